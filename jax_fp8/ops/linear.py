"""`y = x · kernel + bias` as three FP8 GEMMs, one per pass, made of the passes in ops/passes.py.

The bfloat16 `x` is not kept: the backward has xᵀ and the kernel in FP8. The GEMM adds a residual itself, before it
rounds the result once. With kernels side by side the result is a tuple, one array a kernel.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jax_fp8.core.cast import Cast
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.shards import SplitDim, TensorParallel
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.amax import as_matrix
from jax_fp8.kernels.quantize import Matrices, as_tuple, quantize_rowwise, quantize_transpose
from jax_fp8.kernels.vma import match_vma
from jax_fp8.ops.collectives import gather_pair
from jax_fp8.ops.operands import quantize_gradient, quantize_input
from jax_fp8.ops.parameters import LinearParameters, ParamInfo
from jax_fp8.ops.passes import backward_gemm, forward_gemm, forward_rows, plain_linear


def linear(
    x: jax.Array,
    parameters: LinearParameters,
    gemm: Fp8Gemm | None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    residual: PyTree = None,
    recompute: bool = False,
    tensor: TensorParallel | None = None,
    split_dim: SplitDim | None = None,
) -> tuple[PyTree, jax.Array | None]:
    """Multiply `x` (..., k) by the kernel and add the bias.

    Args:
      x: (..., k), any leading dims.
      parameters: kernel and bias in the params' dtype, or tuples of them for kernels side by side.
      gemm: how to quantize, or None for a plain product in `dtype`.
      dtype: of the result.
      residual: (..., n), added to the result; for kernels side by side a tuple of (..., n_i), with None where
        nothing is added.
      recompute: keep `x` for the backward and quantize it again, instead of keeping xᵀ in FP8. This saves memory where
        something else keeps `x` anyway.
      tensor, split_dim: in a step on shards, the mesh axis that splits the kernel, and whether by columns or by rows.
        By columns, `x` is the same on all devices, and the result has this device's columns. By rows, `x` has this
        device's columns, and the result is the same on all. With sequence parallelism each device has its part of the
        rows wherever arrays would be the same on all.

    Returns:
      (..., n) in `dtype`, or of kernels side by side a tuple of (..., n_i);
      and the amaxes of input and kernel f32[2] (None without `gemm`).
    """
    x = x.astype(dtype)
    leading = _leading_dims(x.shape[:-1], tensor, split_dim)
    _check_residual(residual, parameters, leading)
    if gemm is None:
        in_parts = parameters.in_parts
        y = plain_linear(x, parameters, dtype, in_parts, residual=residual, tensor=tensor, split_dim=split_dim)
        return y, None
    rows = jax.tree.map(lambda part: as_matrix(part.astype(dtype)), residual)
    by_columns, by_rows = (tensor if split_dim == of else None for of in ("columns", "rows"))
    static = _Static(dtype, recompute, parameters.widths, parameters.in_parts, by_columns, by_rows)
    matrix, parameters, rows = match_vma(as_matrix(x), parameters, rows)
    out: PyTree = _linear(static, matrix, parameters, gemm, rows)
    y, amaxes = out
    return jax.tree.map(lambda part: part.reshape(*leading, part.shape[-1]), y), amaxes


def _check_residual(residual: PyTree, parameters: LinearParameters, leading: tuple[int, ...]) -> None:
    if residual is None:
        return
    expected = [(*leading, width) for width in parameters.widths]
    parts = zip(as_tuple(residual), expected, strict=False)
    shapes = [shape if part is None else part.shape for part, shape in parts]
    if isinstance(residual, tuple) != parameters.in_parts or shapes != expected:
        raise ValueError(
            f"a residual must have the shape of the result, {', '.join(map(str, expected))}, "
            f"got {', '.join(map(str, shapes))}; reshape or broadcast it"
        )


def _leading_dims(
    leading: tuple[int, ...], tensor: TensorParallel | None, split_dim: SplitDim | None
) -> tuple[int, ...]:
    """The leading dims of the result."""
    if tensor is None or split_dim is None:
        return leading
    return tensor.all_rows(leading) if split_dim == "columns" else tensor.own_rows(leading)


@dataclass(frozen=True)
class _Static:
    dtype: jax.typing.DTypeLike
    recompute: bool
    widths: tuple[int, ...]
    in_parts: bool
    by_columns: TensorParallel | None
    by_rows: TensorParallel | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(static: _Static, x: jax.Array, parameters: LinearParameters, gemm: Fp8Gemm, residual: PyTree):
    return _run(static, x, parameters, gemm, residual, keep=False, forward_only=True)[0]


def _run(
    static: _Static,
    x: jax.Array,
    parameters: LinearParameters,
    gemm: Fp8Gemm,
    residual: PyTree,
    keep: bool,
    forward_only: bool = False,
):
    has_own_rows = static.by_columns is not None and static.by_columns.sequence
    in_some_parts = static.in_parts and residual is not None  # whose products the kernel makes part by part
    forward_only = forward_only and static.by_columns is None and static.by_rows is None and not in_some_parts
    quantized = quantize_input(x, gemm, keep and not has_own_rows, forward_only).gathered(static.by_columns, keep)
    if static.by_rows is None:
        y, amaxes, kept = forward_gemm(quantized, parameters, gemm, static.dtype, residual, static.in_parts)
    else:
        y, amaxes, kept = forward_rows(quantized, parameters, gemm, static.dtype, residual, static.by_rows)
    return (y, amaxes), kept


def _forward(static: _Static, x: jax.Array, parameters: LinearParameters, gemm: Fp8Gemm, residual: PyTree):
    keep = not (static.recompute or parameters.is_frozen)
    out, kept = _run(static, x, parameters, gemm, residual, keep)
    again = x if static.recompute and not parameters.is_frozen else None
    return out, (again, kept, ParamInfo.from_arrays((x, residual, parameters)), gemm)


def _transposed_input(static: _Static, x: jax.Array, cast: Cast) -> Fp8Pair:
    """x again, transposed in FP8: the forward did not keep it."""
    if static.by_columns is None or not static.by_columns.sequence:
        return quantize_transpose(x, cast)
    return gather_pair(quantize_rowwise(x, cast), static.by_columns)


def _backward(static: _Static, residuals: tuple, cotangents: tuple):
    x, kept, (x_like, residual_like, parameters_like), gemm = residuals
    dy, _ = cotangents
    kept = kept.with_input(partial(_transposed_input, static), x, after=dy)
    quantized, dbias = quantize_gradient(dy, parameters_like, gemm, static.by_rows)
    dx, gradients = backward_gemm(
        quantized, dbias, kept, parameters_like, gemm, static.dtype, static.widths, static.by_columns
    )
    recorded = kept.record(quantized, gemm)
    return x_like.place(dx), gradients, recorded, _residual_gradient(dy, residual_like)


def _residual_gradient(dy: Matrices, likes: PyTree) -> PyTree:
    if not isinstance(dy, tuple) or likes is None:
        return None if likes is None else likes.place(dy)
    return tuple(None if like is None else like.place(part) for part, like in zip(dy, likes, strict=True))


_linear.defvjp(_forward, _backward)
