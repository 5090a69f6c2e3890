"""The collectives of tensor parallelism, for all composite ops: at the input of a layer and at its output.

One mesh axis splits a layer: its first GEMM by columns of the kernel, its last one by rows. The input is the same on
all devices, and the output is a sum over them:

    x ─enter→ GEMM by columns → GEMM by rows ─leave→ y          (https://arxiv.org/abs/1909.08053, section 3)

    tensor parallel              enter: nothing      leave: all-reduce         and so backward, the other way round
    with sequence parallelism    enter: all-gather   leave: reduce-scatter     (https://arxiv.org/abs/2205.05198)

With sequence parallelism each device keeps its part of the rows between layers. Rows are flattened tokens in
contiguous blocks, so that all-gather and reduce-scatter move whole blocks. The input of a GEMM is gathered in FP8 and
in one orientation; the other one is transposed here. Sums are reduced in the dtype of activations.

`tensor` is None where layers are not split; then all functions here return their input.
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


def own_rows(x: jax.Array, tensor: TensorParallel | None) -> jax.Array:
    """This device's rows (m / size, ...) of those of all devices (m, ...)."""
    if tensor is None or not tensor.sequence:
        return x
    own = x.shape[0] // tensor.size
    return lax.dynamic_slice_in_dim(x, lax.axis_index(tensor.axis) * own, own)


def reduce_rows(partial_sums: jax.Array, tensor: TensorParallel | None) -> jax.Array:
    """The sum (m, ...) over the devices: all of it, or with sequence parallelism each device's own rows."""
    if tensor is None:
        return partial_sums
    if tensor.sequence:
        return scattered_sum(partial_sums, tensor.axis, 0)
    return lax.psum(partial_sums, tensor.axis)


def gather_pair(own: Fp8Pair, tensor: TensorParallel | None, keep: bool = True) -> Fp8Pair:
    """The rows of all devices of a matrix in FP8, gathered rowwise; with `keep` in both orientations."""
    if tensor is None or not tensor.sequence:
        return own
    return whole_pair(replace(own.rowwise, values=gather_rows(own.rowwise.values, tensor)), own, keep)


def whole_pair(rowwise: Fp8Array, part: Fp8Pair, keep: bool = True) -> Fp8Pair:
    """A gathered matrix and its transpose. The parts (m, n) must have been cast with one scale for the whole tensor, or
    in both orientations in squares of which each part has whole ones: then the transpose has known scales.
    """
    if not rowwise.scale.ndim:
        if keep:
            return Fp8Pair.with_shared_scale(rowwise.values, transpose(rowwise.values), rowwise.scale, part.amax)
        return Fp8Pair(rowwise, None, part.amax)
    down, across = part.rowwise.granularity
    if part.columnwise is None or part.columnwise.granularity != (across, down) or part.rowwise.shape[0] % down:
        raise ValueError(
            "gathered rows must have one scale for the whole tensor, or whole squares with a scale each, got "
            f"other scales by tile, {down} x {across}; leave out sequence parallelism and fsdp, or use another recipe"
        )
    columnwise = Fp8Array(transpose(rowwise.values), rowwise.scale.T, part.columnwise.tile) if keep else None
    return Fp8Pair(rowwise, columnwise, part.amax)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter(x: jax.Array, tensor: TensorParallel | None) -> jax.Array:
    """The input of a split layer, on each device as its first product needs it; for products that are not in FP8."""
    return gather_rows(x, tensor)


enter.defvjp(
    lambda x, tensor: (gather_rows(x, tensor), None),
    lambda tensor, _, dx: (reduce_rows(dx, tensor),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave(partial_sums: jax.Array, tensor: TensorParallel | None) -> jax.Array:
    """The output of a split layer from each device's partial sums; the mirror image of `enter`."""
    return reduce_rows(partial_sums, tensor)


leave.defvjp(
    lambda sums, tensor: (reduce_rows(sums, tensor), None),
    lambda tensor, _, dy: (gather_rows(dy, tensor),),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered_columns(own: jax.Array, tensor: TensorParallel | None) -> jax.Array:
    """All columns (..., n) from each device's own (..., n / size), for computations that every device repeats."""
    return own if tensor is None else lax.all_gather(own, tensor.axis, axis=own.ndim - 1, tiled=True)


def _own_columns(tensor: TensorParallel | None, _: object, dy: jax.Array):
    if tensor is None:
        return (dy,)
    own = dy.shape[-1] // tensor.size
    return (lax.dynamic_slice_in_dim(dy, lax.axis_index(tensor.axis) * own, own, axis=-1),)


gathered_columns.defvjp(lambda own, tensor: (gathered_columns(own, tensor), None), _own_columns)
