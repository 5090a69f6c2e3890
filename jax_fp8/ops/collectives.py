"""The collectives of tensor parallelism, for all composite ops: what enters a layer, and what leaves it.

A layer is split over the devices of one axis: the first GEMM by columns, the last one by rows of its kernel. What
enters is the same on all devices, and what leaves is a sum over them:

    x ─enter→ GEMM by columns → GEMM by rows ─leave→ y          (https://arxiv.org/abs/1909.08053, section 3)

    tensor parallel              enter: nothing      leave: all-reduce         and so backward, the other way round
    with sequence parallelism    enter: all-gather   leave: reduce-scatter     (https://arxiv.org/abs/2205.05198)

With sequence parallelism each device keeps its part of the rows between layers. Rows are flattened tokens, in blocks:
what is gathered or scattered is contiguous, and what a GEMM reads goes over the wire in FP8, in one orientation. The
other one is made of it here. What is summed is in the dtype of activations.

`tensor` is None where layers are not split; then all of this does nothing.
"""

from dataclasses import replace
from functools import partial

import jax
from jax import lax

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.shards import TensorParallel, scattered_sum
from jax_fp8.kernels.transpose import transpose


def gather_rows(x: jax.Array, tensor: TensorParallel | None) -> jax.Array:
    """The rows (m, ...) of all devices, from each one's own (m / size, ...)."""
    if tensor is None or not tensor.sequence:
        return x
    return lax.all_gather(x, tensor.axis, axis=0, tiled=True)


def reduce_rows(partial_sums: jax.Array, tensor: TensorParallel | None) -> jax.Array:
    """The sum (m, ...) over the devices: all of it, or with sequence parallelism each device's own rows."""
    if tensor is None:
        return partial_sums
    if tensor.sequence:
        return scattered_sum(partial_sums, tensor.axis, 0)
    return lax.psum(partial_sums, tensor.axis)


def gather_pair(own: Fp8Pair, tensor: TensorParallel | None, keep: bool = True) -> Fp8Pair:
    """The rows of all devices of a matrix in FP8, with `keep` in both orientations; of `own` the rowwise one counts."""
    if tensor is None or not tensor.sequence:
        return own
    return whole_pair(replace(own.rowwise, values=gather_rows(own.rowwise.values, tensor)), own, keep)


def whole_pair(rowwise: Fp8Array, part: Fp8Pair, keep: bool = True) -> Fp8Pair:
    """A matrix, and its transpose of which the scales must be known: gathered from parts (m, n) that were cast with one
    scale, or in both orientations in squares, of which each part has whole ones.
    """
    if not rowwise.scale.ndim:
        if keep:
            return Fp8Pair.with_shared_scale(rowwise.values, transpose(rowwise.values), rowwise.scale, part.amax)
        return Fp8Pair(rowwise, None, part.amax)
    down, across = part.rowwise.granularity
    if part.columnwise is None or part.columnwise.granularity != (across, down) or part.rowwise.shape[0] % down:
        raise ValueError(
            "rows that are gathered must have one scale for the whole tensor, or whole squares with a scale each, got "
            f"other scales by tile, {down} x {across}; leave out sequence parallelism and fsdp, or use another recipe"
        )
    columnwise = Fp8Array(transpose(rowwise.values), rowwise.scale.T, part.columnwise.tile) if keep else None
    return Fp8Pair(rowwise, columnwise, part.amax)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter(x: jax.Array, tensor: TensorParallel | None) -> jax.Array:
    """What a split layer computes with, from what enters it; for products that are not in FP8."""
    return gather_rows(x, tensor)


enter.defvjp(
    lambda x, tensor: (gather_rows(x, tensor), None),
    lambda tensor, _, dx: (reduce_rows(dx, tensor),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave(partial_sums: jax.Array, tensor: TensorParallel | None) -> jax.Array:
    """What leaves a split layer; the mirror image of `enter`."""
    return reduce_rows(partial_sums, tensor)


leave.defvjp(
    lambda sums, tensor: (reduce_rows(sums, tensor), None),
    lambda tensor, _, dy: (gather_rows(dy, tensor),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered_columns(own: jax.Array, tensor: TensorParallel | None) -> jax.Array:
    """All columns (..., n) from each device's own (..., n / size), for what is to be computed alike on all devices."""
    return own if tensor is None else lax.all_gather(own, tensor.axis, axis=own.ndim - 1, tiled=True)


def _own_columns(tensor, _, dy):
    if tensor is None:
        return (dy,)
    own = dy.shape[-1] // tensor.size
    return (lax.dynamic_slice_in_dim(dy, lax.axis_index(tensor.axis) * own, own, axis=-1),)


gathered_columns.defvjp(lambda own, tensor: (gathered_columns(own, tensor), None), _own_columns)
