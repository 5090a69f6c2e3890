"""The passes of a GEMM on quantized operands: the parts that every composite op is made of.

    fprop  y[m, n]  = x[m, k]  · w[n, k]ᵀ       x, w E4M3
    dgrad  dx[m, k] = dy[m, n] · kernel[k, n]ᵀ   dy  E5M2
    wgrad  dw[k, n] = xᵀ[k, m] · dyᵀ[n, m]ᵀ      as the params; sums of microbatches float32

Each tensor is contracted along both of its dims, so each is quantized once, in both orientations: the forward consumes
x and wᵀ, and keeps xᵀ and w for the backward, in FP8.

There may be several kernels side by side, (k, n_i), each a parameter of its own: query, key and value, or gate and up.
One cast writes them into one pair (k, n), and one cast writes the gradients of their results into one dy. Where an op
needs its result in parts, one fprop a kernel computes it, and one wgrad a kernel writes each gradient in its place. So
no large array is cut or concatenated. Kernels whose own wgrad would leave most of a GPU idle share one, and its result
is cut; and so is the result of few rows, as in text generation.

These functions do not differentiate: an op has one `custom_vjp` around its passes, and no quantized value crosses its
boundary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from jax_fp8.core.cast import Cast
from jax_fp8.core.checkpoint_names import name_residual
from jax_fp8.core.formats import KERNEL
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.shards import SplitDim, TensorParallel
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.activation_functions import is_gated
from jax_fp8.kernels.amax import amax, as_matrix
from jax_fp8.kernels.explicit import like_columns, product, shards_of
from jax_fp8.kernels.few_rows import FewRows
from jax_fp8.kernels.few_rows_gemm import has_few_rows
from jax_fp8.kernels.gemm import RESULT_DTYPES, matmul
from jax_fp8.kernels.prepared_gemm import can_be_cut, multiply_prepared, product_of
from jax_fp8.kernels.quantize import Matrices, as_tuple, quantize_transpose
from jax_fp8.ops.collectives import enter, leave, reduce_rows
from jax_fp8.ops.gemm_residual import GemmResidual, as_one_array
from jax_fp8.ops.operands import GemmInput
from jax_fp8.ops.parameters import LinearParameters, ParamInfo, gradients_like, infos_of, joined, split_columns
from jax_fp8.ops.stored_product import stored_product

Gradients = TypeVar("Gradients")

PLAIN_SCOPE = "jax_fp8_plain_linear"
# Elements of a kernel whose gradient gets a GEMM of its own: 64 tiles of 128 x 256, for half of an H200's 132 SMs.
SMALLEST_WGRAD = 2**21
CAST_SCOPE = "cast_weights"  # every cast of a weight outside of the optimizer's kernel


def plain_linear(
    x: jax.Array,
    parameters: LinearParameters,
    dtype: jax.typing.DTypeLike,
    in_parts: bool = False,
    *,
    residual: PyTree = None,
    tensor: TensorParallel | None = None,
    split_dim: SplitDim | None = None,
) -> Matrices:
    """The product of `x` (..., k) in `dtype`, without FP8; with `in_parts` a tuple with the columns of each kernel.

    `tensor` and `split_dim` as in `linear`. Sequence parallelism gathers or scatters the flattened leading dims.
    """
    bias, weight = joined(parameters.bias, dtype), parameters.weight
    leading = x.shape[:-1]
    if tensor is not None and split_dim == "columns":
        leading = tensor.all_rows(leading)
        entered: PyTree = enter(as_matrix(x), tensor)
        x = entered.reshape(*leading, x.shape[-1])
    with jax.named_scope(PLAIN_SCOPE):
        y = product(x, joined(parameters.kernel, dtype)) if weight is None else stored_product(x, weight)
    if tensor is not None and split_dim == "rows":
        left: PyTree = leave(as_matrix(y), tensor)
        y = left.reshape(*tensor.own_rows(leading), -1)
    y = y if bias is None else y + lax.broadcast_to_rank(like_columns(bias, y), y.ndim)
    if not in_parts:
        return y if residual is None else y + residual.astype(dtype)
    parts = split_columns(y, parameters.widths)
    if residual is None:
        return parts
    pairs = zip(parts, residual, strict=True)
    return tuple(part if added is None else part + added.astype(dtype) for part, added in pairs)


def keeping_products(function: Callable, recompute: bool) -> Callable:
    """A function without FP8; with `recompute` its backward keeps only inputs, products and results of collectives."""
    return jax.checkpoint(function, policy=_is_product_or_collective) if recompute else function


def _is_product_or_collective(primitive: Primitive, *_: object, **__: object) -> bool:
    kept = "dot_general", "ragged_dot", "psum", "all_gather", "reduce_scatter", "all_to_all", "ragged_all_to_all"
    return primitive.name.startswith(kept)


def cast_weight(kernel: Matrices, cast_of: Callable[[Callable[[], jax.Array]], Cast]) -> Fp8Pair:
    """A kernel (k, n), or several side by side, in FP8 by the cast `cast_of(measure)`; `measure()` is the amax."""
    with jax.named_scope(CAST_SCOPE):
        return quantize_transpose(kernel, cast_of(partial(amax, *as_tuple(kernel))))


def forward_gemm(
    x: GemmInput,
    parameters: LinearParameters,
    gemm: Fp8Gemm,
    dtype: jax.typing.DTypeLike,
    residual: PyTree = None,
    in_parts: bool = False,
    activation: str | None = None,
) -> tuple[PyTree, jax.Array, GemmResidual]:
    """fprop. A residual (m, n) is, with `in_parts`, a tuple of (m, n_i), with None where nothing is added. y goes
    through `activation`, where `takes_activation`.

    Returns:
      y (m, n) with bias and residual (m, n) added, or with `in_parts` a tuple of (m, n_i); amaxes f32[2] of input and
      kernel; and the residuals for the backward.
    """
    weight = gemm.weight or cast_weight(parameters.kernel, partial(gemm.cast, KERNEL))
    rows: PyTree = x.pair.rowwise
    multiply = product_of(rows, dtype, activation, gemm.accumulation("fprop"))
    bias_dtype = jnp.bfloat16 if dtype == jnp.float32 else dtype  # in which the GEMM takes a bias
    with jax.named_scope(f"{gemm.name}/fprop"):
        if in_parts and isinstance(weight.columnwise, tuple):
            biases = parameters.bias or (None,) * len(weight.columnwise)
            added = residual or (None,) * len(weight.columnwise)
            y = tuple(
                multiply(part, bias=joined(bias, bias_dtype), c=c)
                for part, bias, c in zip(weight.columnwise, biases, added, strict=True)
            )
        elif in_parts and residual is None and can_be_cut(rows, weight.columnwise, parameters.widths):
            bias = joined(parameters.bias, bias_dtype)
            y = multiply_prepared(rows, weight.columnwise, dtype=dtype, bias=bias, widths=parameters.widths)
        elif in_parts and residual is None and has_few_rows(rows.shape[0]):
            y = split_columns(multiply(weight.columnwise, bias=joined(parameters.bias, bias_dtype)), parameters.widths)
        elif in_parts:
            parts = _columns(ParamInfo.from_arrays(as_tuple(parameters.kernel)), parameters.widths)
            added = (None,) * len(parts) if residual is None else residual
            bias = joined(parameters.bias, bias_dtype)
            y = tuple(
                multiply(weight.columnwise, bias=bias, **columns, c=part)
                for columns, part in zip(parts, added, strict=True)
            )
        else:
            whole = as_one_array(weight.columnwise, after=rows.x if isinstance(rows, FewRows) else rows.values)
            y = multiply(whole, bias=joined(parameters.bias, bias_dtype), c=residual)
    amaxes = jnp.stack([x.pair.amax, weight.amax])
    transposed = x.pair.columnwise
    x_transposed = transposed and replace(transposed, values=name_residual("gemm_input", transposed.values))
    x_cast = x.cast.again(rows.scale)
    is_transposed = weight.rowwise is None
    kernel = weight.columnwise if is_transposed else weight.rowwise
    return y, amaxes, GemmResidual(x_transposed, x_cast, kernel, amaxes, x.health, is_transposed)


def takes_activation(x: GemmInput, parameters: LinearParameters, activation: str) -> bool:
    """Whether the GEMM's kernel can activate its result: that of few rows."""
    return isinstance(x.pair.rowwise, FewRows) and sum(parameters.widths) % (32 if is_gated(activation) else 16) == 0


def forward_rows(
    x: GemmInput,
    parameters: LinearParameters,
    gemm: Fp8Gemm,
    dtype: jax.typing.DTypeLike,
    residual: jax.Array | None,
    tensor: TensorParallel | None,
) -> tuple[jax.Array, jax.Array, GemmResidual]:
    """`forward_gemm` of a kernel split by rows: sums over the devices, then adds bias and residual in float32."""
    if tensor is None:
        return forward_gemm(x, parameters, gemm, dtype, residual)
    sums, amaxes, kept = forward_gemm(x, replace(parameters, bias=None), gemm, dtype)
    y = reduce_rows(sums, tensor).astype(jnp.float32)
    y = y if parameters.bias is None else y + joined(parameters.bias, jnp.float32)
    y = y if residual is None else y + residual.astype(jnp.float32)
    return y.astype(dtype), amaxes, kept


def backward_gemm(
    dy: Fp8Pair,
    dbias: jax.Array | None,
    residual: GemmResidual,
    parameters_like: LinearParameters,
    gemm: Fp8Gemm,
    dtype: jax.typing.DTypeLike,
    widths: tuple[int, ...],
    tensor: TensorParallel | None = None,
) -> tuple[jax.Array, LinearParameters]:
    """dgrad and wgrad: dx (m, k) in `dtype` and the gradients of kernel and bias.

    Args:
      dbias: f32[n], the column sums of dy; unused without a bias.
      widths: columns of each kernel.
      tensor: the axis that splits the kernel by columns; dx is then a sum over its devices.

    Where the record has a sum of the kernel's gradients, wgrad adds to it, and None is returned in place of a gradient.
    """
    dx = reduce_rows(backward_dgrad(dy, residual, gemm, dtype), tensor)
    gradients = backward_wgrad(dy, dbias, residual, parameters_like, gemm, widths)
    return (dx, gradients) if tensor is None else beside_wgrad(dx, gradients, gemm)


def beside_wgrad(dx: jax.Array, gradients: Gradients, *gemms: Fp8Gemm) -> tuple[jax.Array, Gradients]:
    """The same values, available only once all are: the reduction of dx over `tensor` then overlaps with wgrad.

    XLA's scheduler assumes that a custom call costs nothing, and would leave all weight gradients to the end.
    """
    refs = [ref for gemm in gemms if gemm.record.gradient for ref in gemm.record.gradient.refs]
    dx, gradients, totals = lax.optimization_barrier((dx, gradients, [ref[...] for ref in refs]))
    for ref, total in zip(refs, totals, strict=True):
        ref[...] = total
    return dx, gradients


def backward_dgrad(dy: Fp8Pair, residual: GemmResidual, gemm: Fp8Gemm, dtype: jax.typing.DTypeLike) -> jax.Array:
    """dgrad, the half of `backward_gemm` that needs no xᵀ."""
    _check_rows(dy.rowwise.values, gemm)
    with jax.named_scope(f"{gemm.name}/dgrad"):
        kernel = residual.kernel_for_dgrad(after=dy.rowwise.values)
        return matmul(dy.rowwise, kernel, dtype=dtype, accumulation=gemm.accumulation("dgrad"))


def backward_wgrad(
    dy: Fp8Pair,
    dbias: jax.Array | None,
    residual: GemmResidual,
    parameters_like: LinearParameters,
    gemm: Fp8Gemm,
    widths: tuple[int, ...],
) -> LinearParameters:
    """wgrad, the other half of `backward_gemm`. A frozen weight has no gradient."""
    dkernel: PyTree = as_tuple(parameters_like.kernel)
    if not parameters_like.is_frozen:
        with jax.named_scope(f"{gemm.name}/wgrad"):
            dkernel = _kernel_gradients(residual, dy.columnwise, infos_of(parameters_like.kernel), gemm, widths)
    bias_like = parameters_like.bias
    if not isinstance(parameters_like.kernel, tuple):
        dkernel = dkernel[0]
    if bias_like is None or dbias is None:
        return LinearParameters(dkernel, None)
    # A barrier: XLA would otherwise fuse the cut with the custom call of the optimizer.
    dbiases = lax.optimization_barrier(split_columns(dbias, widths)) if len(widths) > 1 else (dbias,)
    return LinearParameters(dkernel, gradients_like(dbiases, bias_like))


class _Columns(TypedDict, total=False):
    columns: tuple[int, int]
    columns_over: tuple[str, ...]


def _columns(likes: Sequence[ParamInfo], widths: tuple[int, ...]) -> list[_Columns]:
    """The columns of each kernel as arguments of `matmul`; none for a single kernel, whose product is whole."""
    if len(widths) == 1:
        return [{}]
    parts = zip(likes, widths, accumulate(widths), strict=True)
    return [{"columns": (end - width, width), "columns_over": like.columns_over} for like, width, end in parts]


def share_wgrad(in_features: int, widths: tuple[int, ...]) -> bool:
    """Whether one GEMM makes the gradients of kernels (k, n_i) side by side, and its result is cut.

    It does where a GEMM for each would leave most of the GPU idle. It cannot add such gradients to their sums.
    """
    return len(widths) > 1 and in_features * min(widths) < SMALLEST_WGRAD


def _kernel_gradients(
    residual: GemmResidual, dy_transposed: Fp8Array, likes: Sequence[ParamInfo], gemm: Fp8Gemm, widths: tuple[int, ...]
) -> tuple[jax.Array | None, ...]:
    """dw of each kernel; None if it was added to a sum or deferred."""
    x_transposed, how = residual.x_transposed, gemm.accumulation("wgrad")
    assert x_transposed is not None, "kept, or made again by with_input"
    sums, deferral = gemm.record.gradient, gemm.record.deferral
    if deferral is not None:
        deferral.keep(x_transposed, dy_transposed, gemm.record.slot, gemm.name, how)
        return (None,) * len(widths)
    if sums is None:
        return kernel_gradients(x_transposed, dy_transposed, likes, how, widths)
    for ref, part in zip(sums.refs, _columns(likes, widths), strict=True):
        total = ref[...]
        added = matmul(
            x_transposed, dy_transposed, **part, accumulation=how, dtype=jnp.float32, c=total, alpha=sums.weight
        )
        ref[...] = ParamInfo.from_arrays(total).place(added)
    return (None,) * len(widths)


def kernel_gradients(
    x_transposed: Fp8Array,
    dy_transposed: Fp8Array,
    likes: Sequence[ParamInfo],
    accumulation: str,
    widths: tuple[int, ...],
) -> tuple[jax.Array, ...]:
    """wgrad: dw (k, n_i) of each kernel, from xᵀ (k, m) and dyᵀ (n, m); `likes` describe the kernels."""
    multiply = partial(matmul, x_transposed, dy_transposed, accumulation=accumulation)
    if share_wgrad(x_transposed.shape[0], widths):
        whole = multiply(dtype=likes[0].dtype if likes[0].dtype in RESULT_DTYPES else jnp.float32)
        pieces = zip(split_columns(whole, widths), likes, strict=True)
        return tuple(like.place(piece.astype(like.dtype)) for piece, like in pieces)
    parts = zip(_columns(likes, widths), likes, strict=True)
    return tuple(_written_as(like, partial(multiply, **part)) for part, like in parts)


def _written_as(like: ParamInfo, multiply: Callable[..., jax.Array]) -> jax.Array:
    """A gradient in the dtype of its param; the GEMM itself rounds to it where it can."""
    written = like.dtype if like.dtype in RESULT_DTYPES else jnp.float32
    return like.place(multiply(dtype=written).astype(like.dtype))


def _check_rows(dy: jax.Array, gemm: Fp8Gemm) -> None:
    rows, shards = dy.shape[0], shards_of(dy, 0)
    if rows % (16 * shards):
        of_each = f" on each of {shards} devices" if shards > 1 else ""
        raise ValueError(
            f"{gemm.layer}: the weight gradient contracts over batch * sequence, "
            f"which must be a multiple of 16{of_each}, got {rows // shards}; "
            "change the batch or sequence size, pad, or use recipe=None"
        )
