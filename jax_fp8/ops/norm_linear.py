"""norm → quantize → GEMM as one differentiable op.

Kept for the backward: `x` with its two statistics per row, and the FP8 residuals of the GEMM. The normalized activations are not kept,
and with `recompute` neither are their FP8 values.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.scaling import GemmScaling
from jax_fp8.core.state import INPUT
from jax_fp8.kernels.amax import as_matrix
from jax_fp8.kernels.norm import NormParameters, NormStatistics, norm_amax, norm_backward, norm_quantize, normalize
from jax_fp8.ops.linear import (
    LinearParameters,
    Quantized,
    backward_gemm,
    check_parts,
    cut,
    dtypes_of,
    forward_gemm,
    fp8_dtype,
    plain_linear,
    quantize_gradient,
    scale_source,
)


def norm_linear(
    x: jax.Array,
    norm: NormParameters,
    parameters: LinearParameters,
    scaling: GemmScaling | None,
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    return_input: bool = False,
    recompute: bool = False,
    parts: tuple[int, ...] | None = None,
) -> tuple[Any, jax.Array | None]:
    """`linear(normalize(x))` for `x` (..., k).

    Args:
      return_input: hand back `x` too, for a residual branch: the gradient that arrives there is added in the norm's backward pass, and needs
        no pass of its own.
      recompute: normalize and quantize again in the backward instead of keeping the normalized xᵀ in FP8.
      parts: the result as a tuple of up to three arrays of so many columns, which add up to n.

    Returns:
      (..., n) in `dtype` or such a tuple, or a pair of it and `x` in `dtype`; and the amaxes f32[2] (None without scaling).
    """
    check_parts(parts, parameters)
    x = x.astype(dtype)
    if scaling is None:
        y = cut(plain_linear(normalize(x, norm, epsilon, dtype)[0], parameters, dtype), parts)
        return ((y, x) if return_input else y), None
    static = _Static(epsilon, dtype, return_input, recompute, parts)
    out: Any = _norm_linear(static, as_matrix(x), norm, parameters, scaling)
    (y, rows), amaxes = out
    y = jax.tree.map(lambda part: part.reshape(*x.shape[:-1], part.shape[-1]), y)
    return ((y, rows.reshape(x.shape)) if return_input else y), amaxes


def quantize_norm(
    x: jax.Array, norm: NormParameters, epsilon: float, scaling: GemmScaling, keep: bool
) -> tuple[Quantized, NormStatistics]:
    """The normalized `x` (m, k) as the input of a GEMM, with `keep` in both orientations, and what the norm's backward needs."""
    source = scale_source(INPUT, scaling, partial(norm_amax, x, norm, epsilon))
    orientations = "both" if keep else "straight"
    straight, transposed, measured, statistics = norm_quantize(
        x, norm, epsilon, fp8_dtype(INPUT, scaling), source, orientations=orientations
    )
    assert straight is not None, "it was asked for"
    return Quantized(straight, transposed, measured), statistics


def transpose_norm(norm: NormParameters, epsilon: float, x: jax.Array, dtype, source) -> Fp8Array | None:
    """What `quantize_norm` did not keep."""
    return norm_quantize(x, norm, epsilon, dtype, source, orientations="transposed")[1]


@dataclass(frozen=True)
class _Static:
    epsilon: float
    dtype: jax.typing.DTypeLike
    return_input: bool
    recompute: bool
    parts: tuple[int, ...] | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_linear(static, x, norm, parameters, scaling):
    normalized, _ = quantize_norm(x, norm, static.epsilon, scaling, keep=False)
    y, amaxes, _ = forward_gemm(normalized, parameters, scaling, static.dtype, parts=static.parts)
    return (y, x if static.return_input else None), amaxes


def _forward(static, x, norm, parameters, scaling):
    normalized, statistics = quantize_norm(x, norm, static.epsilon, scaling, keep=not static.recompute)
    y, amaxes, kept = forward_gemm(normalized, parameters, scaling, static.dtype, parts=static.parts)
    out = (y, x if static.return_input else None), amaxes
    return out, (x, norm, statistics, kept, dtypes_of(parameters), scaling)


def _backward(static, residuals, cotangents):
    x, norm, statistics, kept, parameters_like, scaling = residuals
    (dy, dresidual), _ = cotangents
    kept = kept.with_input(partial(transpose_norm, norm, static.epsilon), x, scaling, after=dy)
    quantized, dbias = quantize_gradient(dy, parameters_like, scaling)
    dnormalized, gradients = backward_gemm(quantized, dbias, kept, parameters_like, scaling, static.dtype)
    dx, dnorm = norm_backward(dnormalized, x, norm, statistics, dresidual)
    return dx, dnorm, gradients, None


_norm_linear.defvjp(_forward, _backward)
