"""norm → quantize → GEMM as one differentiable op.

Kept for the backward: `x` with its two statistics per row, and the FP8 residuals of the GEMM. The normalized activations are not kept.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jax_fp8.core.scaling import GemmScaling
from jax_fp8.ops.linear import LinearParameters, backward_gemm, dtypes_of, forward_gemm, plain_linear
from jax_fp8.ops.norm import NormParameters, normalize, normalize_backward


def norm_linear(
    x: jax.Array,
    norm: NormParameters,
    parameters: LinearParameters,
    scaling: GemmScaling | None,
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> tuple[jax.Array, jax.Array | None]:
    """`linear(normalize(x))` for `x` (..., k): (..., n) in `dtype`, and the amaxes f32[2] (None without scaling)."""
    x = x.astype(dtype)
    if scaling is None:
        return plain_linear(normalize(x, norm, epsilon, dtype)[0], parameters, dtype), None
    return _norm_linear(epsilon, dtype, x, norm, parameters, scaling)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm_linear(epsilon, dtype, x, norm, parameters, scaling):
    normalized, _ = normalize(x, norm, epsilon, dtype)
    y, amaxes, _ = forward_gemm(normalized, parameters, scaling, dtype, keep=False)
    return y, amaxes


def _forward(epsilon, dtype, x, norm, parameters, scaling):
    normalized, statistics = normalize(x, norm, epsilon, dtype)
    y, amaxes, residual = forward_gemm(normalized, parameters, scaling, dtype, keep=True)
    return (y, amaxes), (x, norm, statistics, residual, dtypes_of(parameters), scaling)


def _backward(epsilon, dtype, residuals, cotangents):
    x, norm, statistics, residual, parameters_like, scaling = residuals
    dy, _ = cotangents
    dnormalized, gradients = backward_gemm(dy, residual, parameters_like, scaling, dtype)
    dx, dnorm = normalize_backward(dnormalized, x, norm, statistics)
    return dx, dnorm, gradients, None


_norm_linear.defvjp(_forward, _backward)
