"""Collectives of a step outside of its layers: params are gathered before it, gradients and amaxes reduced after it.

    shards of params ─gather→ params of a device's layers ─loss, backward→ gradients ─reduce→ gradients of the shards

Where GEMMs read a kernel in FP8, each device casts its shard, and the gather moves FP8, once for all microbatches.
Other params are gathered in the dtype in which layers read them. Gradients are summed over the axes of the batch. Where
`fsdp` splits a param, each device gets the sum for its own shard.
"""

from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.paths import LayerPath, map_with_names
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.shards import largest_amax, scattered_sum
from jax_fp8.core.types import PyTree
from jax_fp8.ops.collectives import whole_pair
from jax_fp8.parallel.mesh import EXPERT, FSDP, PIPE, TENSOR, Parallelism
from jax_fp8.parallel.param_place import ParamPlace
from jax_fp8.parallel.placement import Placement
from jax_fp8.parallel.tiles import has_whole_squares


def gather_params(placement: Placement, params: PyTree, in_fp8: Collection[LayerPath]) -> PyTree:
    """The params that a device computes with, from its shards.

    Args:
      in_fp8: kernels that all their readers have in FP8. They are not gathered. An array of NaN takes their place: it
        gives the gradient its shape and dtype, and makes the loss NaN if somebody reads it after all.
    """
    parallel = placement.parallel

    def gather(path: LayerPath, param: jax.Array, place: ParamPlace) -> jax.Array:
        if path in in_fp8:
            shape = place.shape_in_layer(parallel)
            return jnp.full(shape, jnp.nan, param.dtype if parallel.gradient_dtype is None else parallel.gradient_dtype)
        if place.fsdp_dim is None:
            return param
        return _all_gather(param.astype(place.dtype or param.dtype), place.fsdp_dim, place.storage)

    return map_with_names(gather, params, placement.places)


def gather_weight(places: Collection[ParamPlace], own: Fp8Pair) -> Fp8Pair:
    """A whole weight in FP8 from a device's shard `own`; `places` are those of its kernels, which lie side by side. One
    orientation is gathered, and the other made from it.
    """
    dims = {place.fsdp_dim for place in places}
    if dims == {None}:
        return own
    assert dims == {-2}, "other kernels are gathered before they are cast"
    return whole_pair(gathered_rows(own.rowwise, lambda x: _all_gather(x, -2, (FSDP,))), own)


def gathered_rows(part: Fp8Array, gather: Callable[[jax.Array], jax.Array]) -> Fp8Array:
    """A whole matrix in FP8, from parts of its rows. Scales by tile are gathered like the values."""
    scale = gather(part.scale) if part.scale.ndim else part.scale
    return Fp8Array(gather(part.values), scale, part.tile)


def can_be_gathered_in_fp8(places: Collection[ParamPlace]) -> bool:
    """Whether one gather of rows makes kernels side by side whole in FP8: `fsdp` splits the rows of all, or of none."""
    return {place.fsdp_dim for place in places} in ({None}, {-2})


def cuts_squares(parallel: Parallelism, places: Collection[ParamPlace], recipe: Recipe) -> bool:
    """Whether a tile of these kernels would lie on two devices. Such kernels cannot be gathered in FP8."""
    rows = {place.shape_in_layer(parallel)[-2] // parallel.storage_parts for place in places if place.fsdp_dim}
    return not all(has_whole_squares(recipe, of_device) for of_device in rows)


def reduce_gradients(placement: Placement, gradients: PyTree, params: PyTree) -> PyTree:
    """The gradients of the shards from each device's share of the mean, in the dtypes of `params`: the shards, or other
    arrays like them.
    """
    parallel = placement.parallel

    def reduce(gradient: jax.Array, param: jax.Array, place: ParamPlace) -> jax.Array:
        wire = jnp.promote_types(gradient.dtype, param.dtype)
        if gradient.ndim > 1 and parallel.gradient_dtype is not None:
            wire = parallel.gradient_dtype
        return sum_of(parallel, gradient.astype(wire), place).astype(param.dtype)

    return jax.tree.map(reduce, gradients, params, placement.places, is_leaf=lambda node: isinstance(node, ParamPlace))


def whole_amaxes(parallel: Parallelism, amaxes: jax.Array) -> jax.Array:
    """The maxima over all devices of amaxes f32[rows]: one vector, one collective."""
    return largest_amax(amaxes, _tensor_axes(parallel) + summed_axes(parallel))


def whole_loss(parallel: Parallelism, share: jax.Array) -> jax.Array:
    """The mean over all parts of the batch, from each part's share. The sum is float32 also for a loss in 16 bits."""
    share = share.astype(jnp.float32)
    axes = summed_axes(parallel)
    return lax.psum(share, axes) if axes else share


def summed_axes(parallel: Parallelism) -> tuple[str, ...]:
    """The axes whose devices have parts of a batch: its rows, or in a pipeline its microbatches."""
    return parallel.batch_axes + ((PIPE,) if parallel.stages > 1 else ())


def axes_of_sum(parallel: Parallelism, place: ParamPlace) -> tuple[str, ...]:
    """The axes over which the gradient of a param is a sum. A device has seen the tokens of all devices of `expert` in
    its own experts.
    """
    return tuple(axis for axis in summed_axes(parallel) if place.expert_dim is None or axis != EXPERT)


def on_any_device(parallel: Parallelism, flag: jax.Array) -> jax.Array:
    """Whether a flag bool[] is set on any device: then all devices take the same branch."""
    return lax.pmax(flag.astype(jnp.int32), parallel.mesh.axis_names) > 0


def sum_of(parallel: Parallelism, gradient: jax.Array, place: ParamPlace) -> jax.Array:
    """The gradient of a device's shard, from each device's contribution to the gradient of the whole param."""
    axes = axes_of_sum(parallel, place)
    if place.fsdp_dim is not None:
        dim = gradient.ndim + place.fsdp_dim
        gradient = scattered_sum(gradient, place.storage, dim)
        axes = tuple(axis for axis in axes if axis not in place.storage)
    return sum_over(parallel, gradient, place, axes)


def sum_over(parallel: Parallelism, gradient: jax.Array, place: ParamPlace, axes: tuple[str, ...]) -> jax.Array:
    """The sum over these axes, and over `tensor` where its devices share a param and have parts of its gradient."""
    if parallel.tensor is None or place.tensor_dim is not None:
        return lax.psum(gradient, axes) if axes else gradient
    # The param must stay the same on all devices of `tensor`, to the bit: so all take the same sum.
    # Where each device has computed the whole gradient instead of that of its rows or heads, the result is their mean.
    total = lax.psum(gradient, (*axes, TENSOR))
    is_share = place.is_partial or parallel.sequence_parallel
    return total if is_share else total / parallel.size(TENSOR)


def _tensor_axes(parallel: Parallelism) -> tuple[str, ...]:
    return (TENSOR,) if parallel.tensor is not None else ()


def _all_gather(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    return lax.all_gather(x, axes, axis=x.ndim + dim, tiled=True)
