"""`y = x · kernel + bias` as three FP8 GEMMs, one per pass; what flows between them is in ops/passes.py.

The bfloat16 `x` is not kept: the backward has xᵀ and the kernel in FP8. A residual is added by the GEMM itself, before
the one rounding. With kernels side by side the result is a tuple, one array a kernel.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.kernels.amax import as_matrix
from jax_fp8.kernels.quantize import quantize_transpose
from jax_fp8.kernels.varying import alike
from jax_fp8.ops.passes import (
    Like,
    LinearParameters,
    backward_gemm,
    forward_gemm,
    plain_linear,
    quantize_gradient,
    quantize_input,
)


def linear(
    x: jax.Array,
    parameters: LinearParameters,
    gemm: Fp8Gemm | None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    residual: jax.Array | None = None,
    recompute: bool = False,
) -> tuple[Any, jax.Array | None]:
    """Multiply `x` (..., k) by the kernel and add the bias.

    Args:
      x: (..., k), any leading dims.
      parameters: kernel and bias in the params' dtype, or tuples of them: of kernels side by side.
      gemm: how to quantize, or None for a plain product in `dtype`.
      dtype: of the result.
      residual: (..., n), added to the result; not with kernels side by side.
      recompute: keep `x` for the backward and quantize it again, instead of keeping xᵀ in FP8:
        less memory where something else keeps `x`.

    Returns:
      (..., n) in `dtype`, or of kernels side by side a tuple of (..., n_i);
      and the amaxes of input and kernel f32[2] (None without `gemm`).
    """
    if parameters.in_parts and residual is not None:
        raise ValueError(
            "a residual is added to a result in one part, got one with kernels side by side; add it afterwards"
        )
    x = x.astype(dtype)
    if residual is not None and residual.shape != (*x.shape[:-1], *parameters.widths):
        raise ValueError(
            f"a residual must have the shape of the result, {(*x.shape[:-1], *parameters.widths)}, "
            f"got {residual.shape}; reshape or broadcast it"
        )
    if gemm is None:
        y = plain_linear(x, parameters, dtype, parameters.in_parts)
        return (y if residual is None else y + residual.astype(dtype)), None
    rows = None if residual is None else as_matrix(residual.astype(dtype))
    static = _Static(dtype, recompute, parameters.widths, parameters.in_parts, residual is not None)
    matrix, parameters, rows = alike(as_matrix(x), parameters, rows)
    out: Any = _linear(static, matrix, parameters, gemm, rows)
    y, amaxes = out
    return jax.tree.map(lambda part: part.reshape(*x.shape[:-1], part.shape[-1]), y), amaxes


@dataclass(frozen=True)
class _Static:
    dtype: jax.typing.DTypeLike
    recompute: bool
    widths: tuple[int, ...]
    in_parts: bool
    has_residual: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(static, x, parameters, gemm, residual):
    quantized, cast = quantize_input(x, gemm, keep=False)
    y, amaxes, _ = forward_gemm(quantized, cast, parameters, gemm, static.dtype, residual, static.in_parts)
    return y, amaxes


def _forward(static, x, parameters, gemm, residual):
    quantized, cast = quantize_input(x, gemm, keep=not static.recompute)
    y, amaxes, kept = forward_gemm(quantized, cast, parameters, gemm, static.dtype, residual, static.in_parts)
    return (y, amaxes), (x if static.recompute else None, kept, Like.of((x, residual, parameters)), gemm)


def _backward(static, residuals, cotangents):
    x, kept, (x_like, residual_like, parameters_like), gemm = residuals
    dy, _ = cotangents
    kept = kept.with_input(quantize_transpose, x, after=dy)
    quantized, dbias = quantize_gradient(dy, parameters_like, gemm)
    dx, gradients = backward_gemm(quantized, dbias, kept, parameters_like, gemm, static.dtype, static.widths)
    recorded = gemm.record_backward(kept.all_amaxes(quantized))
    return x_like.place(dx), gradients, recorded, residual_like.place(dy) if static.has_residual else None


_linear.defvjp(_forward, _backward)
