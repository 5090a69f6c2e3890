"""norm → GEMM → activation → quantize → GEMM as one differentiable op: a Transformer's MLP.

Kept for the backward: `x` with its statistics, the input of the activation, and the FP8 residuals of both GEMMs. Neither the normalized
nor the activated tensor is kept: each is used again only in FP8.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jax_fp8.core.scaling import GemmScaling
from jax_fp8.ops.activation import activate, activate_backward
from jax_fp8.ops.linear import LinearParameters, backward_gemm, dtypes_of, forward_gemm, plain_linear
from jax_fp8.ops.norm import NormParameters, normalize, normalize_backward


def norm_mlp(
    x: jax.Array,
    norm: NormParameters,
    up: LinearParameters,
    down: LinearParameters,
    scalings: tuple[GemmScaling, GemmScaling] | None,
    activation: str = "gelu",
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """`linear(activate(linear(normalize(x))))` for `x` (..., k).

    Returns:
      (..., k) in `dtype`, and the amaxes f32[2] of the up and of the down GEMM (None without scalings).
    """
    x = x.astype(dtype)
    if scalings is None:
        hidden = plain_linear(normalize(x, norm, epsilon, dtype)[0], up, dtype)
        return plain_linear(activate(hidden, activation), down, dtype), None
    return _norm_mlp(activation, epsilon, dtype, x, norm, up, down, scalings)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _norm_mlp(activation, epsilon, dtype, x, norm, up, down, scalings):
    return _run(activation, epsilon, dtype, x, norm, up, down, scalings, keep=False)[0]


def _run(activation, epsilon, dtype, x, norm, up, down, scalings, keep):
    normalized, statistics = normalize(x, norm, epsilon, dtype)
    hidden, up_amaxes, up_residual = forward_gemm(normalized, up, scalings[0], dtype, keep)
    y, down_amaxes, down_residual = forward_gemm(activate(hidden, activation), down, scalings[1], dtype, keep)
    return (y, (up_amaxes, down_amaxes)), (statistics, hidden, up_residual, down_residual)


def _forward(activation, epsilon, dtype, x, norm, up, down, scalings):
    out, kept = _run(activation, epsilon, dtype, x, norm, up, down, scalings, keep=True)
    return out, (x, norm, *kept, dtypes_of(up), dtypes_of(down), scalings)


def _backward(activation, epsilon, dtype, residuals, cotangents):
    x, norm, statistics, hidden, up_residual, down_residual, up_like, down_like, scalings = residuals
    dy, _ = cotangents
    dactivated, ddown = backward_gemm(dy, down_residual, down_like, scalings[1], dtype)
    dhidden = activate_backward(dactivated, hidden, activation)
    dnormalized, dup = backward_gemm(dhidden, up_residual, up_like, scalings[0], dtype)
    dx, dnorm = normalize_backward(dnormalized, x, norm, statistics)
    return dx, dnorm, dup, ddown, None


_norm_mlp.defvjp(_forward, _backward)
