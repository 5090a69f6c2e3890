"""norm → GEMM → activation → quantize → GEMM as one differentiable op: a Transformer's MLP.

Kept for the backward: `x` with its statistics, the input of the activation, and the FP8 residuals of both GEMMs. Neither the normalized
nor the activated tensor is kept: each is used again only in FP8. The activated one is made again, for the gradient of its weight, by the
kernel that takes the gradient of the activation, at no cost in bytes; the normalized one is kept in FP8, unless `recompute` makes it again.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.scaling import GemmScaling
from jax_fp8.core.state import INPUT, OUTPUT_GRADIENT
from jax_fp8.kernels.activation import (
    activate,
    activation_amax,
    activation_backward_amax,
    activation_backward_quantize,
    activation_quantize,
)
from jax_fp8.kernels.amax import as_matrix
from jax_fp8.kernels.norm import NormParameters, norm_backward, normalize
from jax_fp8.ops.linear import (
    LinearParameters,
    Quantized,
    backward_dgrad,
    backward_gemm,
    backward_wgrad,
    dtypes_of,
    forward_gemm,
    fp8_dtype,
    plain_linear,
    quantize_gradient,
    scale_source,
)
from jax_fp8.ops.norm_linear import quantize_norm, transpose_norm


def norm_mlp(
    x: jax.Array,
    norm: NormParameters,
    up: LinearParameters,
    down: LinearParameters,
    scalings: tuple[GemmScaling, GemmScaling] | None,
    activation: str = "gelu",
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    residual: bool = False,
    recompute: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """`linear(activate(linear(normalize(x))))` for `x` (..., k).

    Args:
      residual: add `x` to the result, in the last GEMM; its gradient is added in the norm's backward pass.
      recompute: normalize and quantize again in the backward instead of keeping the normalized xᵀ in FP8.

    Returns:
      (..., k) in `dtype`, and the amaxes f32[2] of the up and of the down GEMM (None without scalings).
    """
    x = x.astype(dtype)
    if scalings is None:
        hidden = plain_linear(normalize(x, norm, epsilon, dtype)[0], up, dtype)
        y = plain_linear(activate(hidden, activation), down, dtype)
        return x + y if residual else y, None
    static = _Static(activation, epsilon, dtype, residual, recompute)
    out: Any = _norm_mlp(static, as_matrix(x), norm, up, down, scalings)
    y, amaxes = out
    return y.reshape(x.shape), amaxes


@dataclass(frozen=True)
class _Static:
    activation: str
    epsilon: float
    dtype: jax.typing.DTypeLike
    residual: bool
    recompute: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_mlp(static, x, norm, up, down, scalings):
    return _run(static, x, norm, up, down, scalings, keep=False)[0]


def _run(static, x, norm, up, down, scalings, keep):
    normalized, statistics = quantize_norm(x, norm, static.epsilon, scalings[0], keep)
    hidden, up_amaxes, up_kept = forward_gemm(normalized, up, scalings[0], static.dtype)
    activated = _quantize_activated(hidden, static.activation, scalings[1])
    residual = x if static.residual else None
    y, down_amaxes, down_kept = forward_gemm(activated, down, scalings[1], static.dtype, residual)
    return (y, (up_amaxes, down_amaxes)), (statistics, hidden, up_kept, down_kept)


def _forward(static, x, norm, up, down, scalings):
    out, kept = _run(static, x, norm, up, down, scalings, keep=not static.recompute)
    return out, (x, norm, *kept, dtypes_of(up), dtypes_of(down), scalings)


def _backward(static, residuals, cotangents):
    x, norm, statistics, hidden, up_kept, down_kept, up_like, down_like, scalings = residuals
    dy, _ = cotangents
    quantized, dbias = quantize_gradient(dy, down_like, scalings[1])
    dactivated = backward_dgrad(quantized, down_kept, scalings[1], static.dtype)
    hidden_gradient, hidden_sums, activated = _quantize_hidden_gradient(static, dactivated, hidden, scalings, down_kept)
    down_kept = replace(down_kept, x_transposed=activated)
    ddown = backward_wgrad(quantized, dbias, down_kept, down_like, scalings[1])

    up_kept = up_kept.with_input(partial(transpose_norm, norm, static.epsilon), x, scalings[0], after=dactivated)
    dnormalized, dup = backward_gemm(hidden_gradient, hidden_sums, up_kept, up_like, scalings[0], static.dtype)
    dx, dnorm = norm_backward(dnormalized, x, norm, statistics, dy if static.residual else None)
    return dx, dnorm, dup, ddown, None


_norm_mlp.defvjp(_forward, _backward)


def _quantize_activated(hidden, activation, scaling) -> Quantized:
    source = scale_source(INPUT, scaling, partial(activation_amax, hidden, activation))
    dtype = fp8_dtype(INPUT, scaling)
    straight, _, measured = activation_quantize(hidden, activation, dtype, source, orientations="straight")
    assert straight is not None, "it was asked for"
    return Quantized(straight, None, measured)


def _quantize_hidden_gradient(static, dactivated, hidden, scalings, down_kept) -> tuple[Quantized, jax.Array, Fp8Array]:
    """The gradient of the activation's input, as the output gradient of the GEMM up, with the bias gradient; and the input of the GEMM down, transposed."""
    up, down = scalings
    measure = partial(activation_backward_amax, dactivated, hidden, static.activation)
    straight, transposed, measured, sums, activated = activation_backward_quantize(
        dactivated,
        hidden,
        static.activation,
        fp8_dtype(OUTPUT_GRADIENT, up),
        scale_source(OUTPUT_GRADIENT, up, measure),
        fp8_dtype(INPUT, down),
        down_kept.x_scale,
    )
    return Quantized(straight, transposed, measured), sums, activated
