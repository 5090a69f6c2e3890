"""What moves between the devices of a step beside its layers: params before it, gradients and amaxes after it.

    shards of params ─gather→ what a device computes with ─loss, backward→ gradients ─reduce→ gradients of the shards

A kernel that GEMMs read in FP8 is cast where it lies, and goes over the wire in FP8, once for all microbatches; what
else is read in one dtype goes in that. Gradients are summed over the batch's axes, and where `fsdp` splits a param each
device gets the sum of its own shard.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.paths import LayerPath, map_with_names
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.shards import largest_amax, scattered_sum
from jax_fp8.ops.collectives import whole_pair
from jax_fp8.parallel.mesh import FSDP, PIPE, TENSOR, Parallelism
from jax_fp8.parallel.placement import ParamPlace, Placement
from jax_fp8.parallel.tiles import has_whole_squares


def gather_params(placement: Placement, params: Any, in_fp8: Collection[LayerPath]) -> Any:
    """What a device computes with, from its shards.

    Args:
      in_fp8: kernels that all their readers have in FP8. They are not gathered: in their place stands an array of NaN,
        which gives the gradient its shape and its dtype, and whoever reads it after all cannot fail to notice.
    """
    parallel = placement.parallel

    def gather(path, param, place: ParamPlace):
        if path in in_fp8:
            shape = place.shape_without_fsdp(parallel.size(TENSOR))
            return jnp.full(shape, jnp.nan, param.dtype if parallel.gradient_dtype is None else parallel.gradient_dtype)
        if place.fsdp_dim is None:
            return param
        return _all_gather(param.astype(place.dtype or param.dtype), place.fsdp_dim, place.storage)

    return map_with_names(gather, params, placement.places)


def gather_weight(places: Collection[ParamPlace], own: Fp8Pair) -> Fp8Pair:
    """A weight in FP8, of kernels that lie like this side by side, from its shard: one orientation is gathered, the
    other made of it.
    """
    dims = {place.fsdp_dim for place in places}
    if dims == {None}:
        return own
    assert dims == {-2}, "other kernels are gathered before they are cast"
    return whole_pair(gathered_rows(own.rowwise, lambda x: _all_gather(x, -2, (FSDP,))), own)


def gathered_rows(part: Fp8Array, gather: Callable[[jax.Array], jax.Array]) -> Fp8Array:
    """A matrix in FP8, of parts of its rows: by tile, also the scales are in parts."""
    scale = gather(part.scale) if part.scale.ndim else part.scale
    return Fp8Array(gather(part.values), scale, part.tile)


def can_be_gathered_in_fp8(places: Collection[ParamPlace]) -> bool:
    """Whether kernels side by side lie so that their rows can be gathered as one FP8 array."""
    return {place.fsdp_dim for place in places} in ({None}, {-2})


def cuts_squares(parallel: Parallelism, places: Collection[ParamPlace], recipe: Recipe) -> bool:
    """Whether kernels that could be gathered lie so that their tiles cannot be: between two devices some are cut."""
    rows = {
        place.shape_without_fsdp(parallel.size(TENSOR))[-2] // parallel.storage_parts
        for place in places
        if place.fsdp_dim
    }
    return not all(has_whole_squares(recipe, of_device) for of_device in rows)


def reduce_gradients(placement: Placement, gradients: Any, params: Any) -> Any:
    """The gradients of the shards, in the dtypes of the params, from each device's share of the mean. `params` are
    those of the shards, or others of the dtypes that are wanted.
    """
    parallel = placement.parallel

    def reduce(gradient, param, place):
        wire = jnp.promote_types(gradient.dtype, param.dtype)
        if gradient.ndim > 1 and parallel.gradient_dtype is not None:
            wire = parallel.gradient_dtype
        return sum_of(parallel, gradient.astype(wire), place).astype(param.dtype)

    return jax.tree.map(reduce, gradients, params, placement.places, is_leaf=lambda node: isinstance(node, ParamPlace))


def whole_amaxes(parallel: Parallelism, amaxes: jax.Array) -> jax.Array:
    """The amaxes f32[rows] of all devices: one vector, one collective."""
    return largest_amax(amaxes, _tensor_axes(parallel) + summed_axes(parallel))


def whole_loss(parallel: Parallelism, share: jax.Array) -> jax.Array:
    """The mean over all parts of the batch, from each part's share; also of a loss in 16 bits the sum is float32."""
    share = share.astype(jnp.float32)
    axes = summed_axes(parallel)
    return lax.psum(share, axes) if axes else share


def summed_axes(parallel: Parallelism) -> tuple[str, ...]:
    """Those whose devices have parts of a batch: its rows, or in a pipeline its microbatches."""
    return parallel.batch_axes + ((PIPE,) if parallel.stages > 1 else ())


def on_any_device(parallel: Parallelism, flag: jax.Array) -> jax.Array:
    """Whether a flag bool[] is set on any device: what devices decide alike, they must know alike."""
    return lax.pmax(flag.astype(jnp.int32), parallel.mesh.axis_names) > 0


def sum_of(parallel: Parallelism, gradient: jax.Array, place: ParamPlace) -> jax.Array:
    """The gradient of a shard, from what each device has of the whole param's."""
    axes = summed_axes(parallel)
    if place.fsdp_dim is not None:
        dim = gradient.ndim + place.fsdp_dim
        gradient = scattered_sum(gradient, place.storage, dim)
        axes = tuple(axis for axis in axes if axis not in place.storage)
    return sum_over(parallel, gradient, place, axes)


def sum_over(parallel: Parallelism, gradient: jax.Array, place: ParamPlace, axes: tuple[str, ...]) -> jax.Array:
    """The sum over these axes, and over `tensor` where its devices have parts of it."""
    if parallel.tensor is None or place.tensor_dim is not None:
        return lax.psum(gradient, axes) if axes else gradient
    # The param is the same on all devices of `tensor`, and must stay so, to the bit: so all take one sum.
    # Where each has computed the whole gradient, and not that of its rows or heads, it is their mean.
    total = lax.psum(gradient, (*axes, TENSOR))
    is_share = place.is_partial or parallel.sequence_parallel
    return total if is_share else total / parallel.size(TENSOR)


def _tensor_axes(parallel) -> tuple[str, ...]:
    return (TENSOR,) if parallel.tensor is not None else ()


def _all_gather(x, dim, axes) -> jax.Array:
    return lax.all_gather(x, axes, axis=x.ndim + dim, tiled=True)
