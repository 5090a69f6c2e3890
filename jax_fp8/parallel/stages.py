"""Which layers each stage of a pipeline computes, and how their params and gradients move over the axis `pipe`.

    shards of all layers ─all-to-all→ the stage's own layers, whole ─a schedule→ gradients ─all-to-all→ of the shards

Each device of `pipe` stores a part of every layer (parallel/placement.py). So the tree of params is the same on every
mesh, and an optimizer need not know of stages. Once a step each stage gets the params of its own layers, in FP8 where
its GEMMs read FP8. The layers that have the same number on their stages share one all-to-all for each param: a device
sends its parts of the other stages' layers, and receives the other parts of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.shards import largest_amax, scattered_sum
from jax_fp8.ops.collectives import whole_pair
from jax_fp8.parallel.mesh import FSDP, PIPE, Parallelism
from jax_fp8.parallel.param_place import ParamPlace
from jax_fp8.parallel.schedules import layers_of_stage
from jax_fp8.parallel.transfers import axes_of_sum, sum_over


@dataclass(frozen=True)
class Stages:
    """The layers of a model on the stages of a pipeline.

    Args:
      layers: their names, in order.
      stages, chunks: how many stages, and how many chunks each stage has.
    """

    layers: tuple[str, ...]
    stages: int
    chunks: int = 1

    def __post_init__(self):
        layers_of_stage(0, len(self.layers), self.stages, self.chunks)  # raises unless they can be divided

    @property
    def chunk_size(self) -> int:
        return len(self.layers) // (self.stages * self.chunks)

    def at(self, chunk: int, number: int) -> tuple[str, ...]:
        """The layer with this number in this chunk, of each stage."""
        of_stages = (layers_of_stage(s, len(self.layers), self.stages, self.chunks) for s in range(self.stages))
        return tuple(self.layers[chunks[chunk][number]] for chunks in of_stages)


@partial(jax.jit, inline=True)  # jax traces it once for each shape, and inlines it
def own_of(arrays: Sequence[jax.Array]) -> jax.Array:
    """This stage's array, from one array for each stage."""
    return jnp.stack(arrays)[lax.axis_index(PIPE)]


def own_param(shards: Sequence[jax.Array], place: ParamPlace) -> jax.Array:
    """A param of the stage's own layer, from this device's shards of that param in the layers of all stages. `tensor`
    still splits it.
    """
    if place.fsdp_dim is None:
        return own_of(shards)
    shards = [shard.astype(place.dtype or shard.dtype) for shard in shards]
    return _gather(_exchange(jnp.stack(shards), place.fsdp_dim), place)


def own_weights(weights: Sequence[Sequence[Fp8Pair]], places: Sequence[Sequence[ParamPlace]]) -> list[Fp8Pair]:
    """Weights in FP8 of the stage's own layers.

    Args:
      weights: for each GEMM, this device's parts of the weights of all stages, cast before the exchange.
      places: for each GEMM, those of its kernels.
    """
    if not weights:
        return []
    amaxes = largest_amax(jnp.stack([jnp.stack([part.amax for part in parts]) for parts in weights]), (PIPE,))
    own_pairs = []
    for parts, kernels, amax in zip(weights, places, amaxes, strict=True):
        place, own = kernels[0], amax[lax.axis_index(PIPE)]
        if place.fsdp_dim is None:
            mine = jax.tree.map(lambda *of_stages: own_of(of_stages), *parts)
            own_pairs.append(replace(mine, amax=own))
        else:
            own_pairs.append(whole_pair(_exchanged(parts, place), replace(parts[0], amax=own)))
    return own_pairs


def _exchanged(parts: Sequence[Fp8Pair], place: ParamPlace) -> Fp8Array:
    """The stage's own weight, rowwise, from this device's parts of the weights of all stages."""
    scales = [part.rowwise.scale for part in parts]

    def whole(of_stages: list[jax.Array]) -> jax.Array:
        assert place.fsdp_dim is not None, "a weight that is whole is not exchanged"
        return _gather(_exchange(jnp.stack(of_stages), place.fsdp_dim), place)

    values = whole([part.rowwise.values for part in parts])
    return Fp8Array(values, whole(scales) if scales[0].ndim else own_of(scales), parts[0].rowwise.tile)


def gradients_of_layers(parallel: Parallelism, gradient: jax.Array, place: ParamPlace) -> tuple[jax.Array, ...]:
    """The gradients of this device's shards of the layers of all stages, from the gradient of the stage's own layer."""
    axes = axes_of_sum(parallel, place)
    if place.fsdp_dim is None:
        mine = jnp.arange(parallel.stages) == lax.axis_index(PIPE)
        of_all = jnp.where(mine.reshape(-1, *[1] * gradient.ndim), gradient, 0)
    else:
        if FSDP in place.storage:
            dim = gradient.ndim + place.fsdp_dim
            gradient = scattered_sum(gradient, FSDP, dim)
        of_all = _split(gradient, parallel.stages, place.fsdp_dim)
        of_all = lax.all_to_all(of_all, PIPE, split_axis=0, concat_axis=0)
        axes = tuple(axis for axis in axes if axis not in place.storage)
    of_all = sum_over(parallel, of_all, place, axes)
    return tuple(of_all[stage] for stage in range(parallel.stages))


def _exchange(of_stages: jax.Array, dim: int) -> jax.Array:
    """This device's parts (stages, ...) of each stage's array → all parts of its own array, side by side in `dim`."""
    parts = lax.all_to_all(of_stages, PIPE, split_axis=0, concat_axis=0)
    parts = jnp.moveaxis(parts, 0, parts.ndim - 1 + dim)  # before the dim that was split
    shape = [*parts.shape]
    at = parts.ndim + dim
    shape[at - 1 : at + 1] = [shape[at - 1] * shape[at]]
    return parts.reshape(shape)


def _split(whole: jax.Array, stages: int, dim: int) -> jax.Array:
    """The inverse of the merge in `_exchange`: `dim` cut in parts, (stages, ...)."""
    at = whole.ndim + dim
    parts = whole.reshape(*whole.shape[:at], stages, -1, *whole.shape[at + 1 :])
    return jnp.moveaxis(parts, at, 0)


def _gather(part: jax.Array, place: ParamPlace) -> jax.Array:
    """Gathered over `fsdp`, where it splits the param, too."""
    if FSDP not in place.storage:
        return part
    assert place.fsdp_dim is not None, "a param that is whole is not exchanged"
    return lax.all_gather(part, FSDP, axis=part.ndim + place.fsdp_dim, tiled=True)
