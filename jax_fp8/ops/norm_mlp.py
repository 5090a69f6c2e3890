"""norm → GEMM → activation → quantize → GEMM as one differentiable op: a Transformer's MLP.

Kept for the backward: `x` with its statistics, the input of the activation, and the FP8 residuals of both GEMMs.
Neither the normalized nor the activated tensor is kept: each is used again only in FP8. The activated one is made
again, for the gradient of its weight, by the kernel that takes the gradient of the activation, at no cost in bytes; the
normalized one is kept in FP8, unless `recompute` makes it again.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8.core.formats import INPUT, OUTPUT_GRADIENT
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.kernels.activation import (
    activate,
    activation_amax,
    activation_backward_amax,
    activation_backward_quantize,
    activation_quantize,
)
from jax_fp8.kernels.amax import as_matrix
from jax_fp8.kernels.norm import NormParameters, norm_backward, normalize
from jax_fp8.ops.norm_linear import quantize_norm, transpose_norm
from jax_fp8.ops.passes import (
    Like,
    LinearParameters,
    backward_dgrad,
    backward_gemm,
    backward_wgrad,
    forward_gemm,
    plain_linear,
    quantize_gradient,
)


def norm_mlp(
    x: jax.Array,
    norm: NormParameters,
    up: LinearParameters,
    down: LinearParameters,
    gemms: tuple[Fp8Gemm, Fp8Gemm] | None,
    activation: str = "gelu",
    epsilon: float = 1e-6,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    residual: bool = False,
    recompute: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """`linear(activate(linear(normalize(x))))` for `x` (..., k).

    Args:
      up: of a gated activation the kernels of gate and up side by side,
        or one of twice the width with the gate in its first half.
      residual: add `x` to the result, in the last GEMM; its gradient is added in the norm's backward pass.
      recompute: normalize and quantize again in the backward instead of keeping the normalized xᵀ in FP8.

    Returns:
      (..., k) in `dtype`, and the amaxes f32[2] of the up and of the down GEMM (None without `gemms`).
    """
    x = x.astype(dtype)
    if gemms is None:
        hidden = plain_linear(normalize(x, norm, epsilon, dtype)[0], up, dtype)
        y = plain_linear(activate(hidden, activation), down, dtype)
        return x + y if residual else y, None
    static = _Static(activation, epsilon, dtype, residual, recompute, up.widths, down.widths)
    out: Any = _norm_mlp(static, as_matrix(x), norm, up, down, gemms)
    y, amaxes = out
    return y.reshape(x.shape), amaxes


@dataclass(frozen=True)
class _Static:
    activation: str
    epsilon: float
    dtype: jax.typing.DTypeLike
    residual: bool
    recompute: bool
    up_widths: tuple[int, ...]
    down_widths: tuple[int, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_mlp(static, x, norm, up, down, gemms):
    return _run(static, x, norm, up, down, gemms, keep=False)[0]


def _run(static, x, norm, up, down, gemms, keep):
    normalized, cast, statistics = quantize_norm(x, norm, static.epsilon, gemms[0], keep)
    hidden, up_amaxes, up_kept = forward_gemm(normalized, cast, up, gemms[0], static.dtype)
    activated_cast = gemms[1].cast(INPUT, partial(activation_amax, hidden, static.activation))
    activated = activation_quantize(hidden, static.activation, activated_cast, orientations="rowwise")
    residual = x if static.residual else None
    y, down_amaxes, down_kept = forward_gemm(activated, activated_cast, down, gemms[1], static.dtype, residual)
    return (y, (up_amaxes, down_amaxes)), (statistics, hidden, up_kept, down_kept)


def _forward(static, x, norm, up, down, gemms):
    out, kept = _run(static, x, norm, up, down, gemms, keep=not static.recompute)
    return out, (x, norm, *kept, Like.of(up), Like.of(down), gemms)


def _backward(static, residuals, cotangents):
    x, norm, statistics, hidden, up_kept, down_kept, up_like, down_like, (up_gemm, down_gemm) = residuals
    dy, _ = cotangents
    quantized, dbias = quantize_gradient(dy, down_like, down_gemm)
    dactivated = backward_dgrad(quantized, down_kept, down_gemm, static.dtype)
    # The gradient of the activation's input is the output gradient of the GEMM up;
    # beside it, the input of the GEMM down.
    measure = partial(activation_backward_amax, dactivated, hidden, static.activation)
    hidden_cast = up_gemm.cast(OUTPUT_GRADIENT, measure)
    dhidden, dhidden_sums, activated = activation_backward_quantize(
        dactivated, hidden, static.activation, hidden_cast, down_kept.x_cast
    )
    down_kept = replace(down_kept, x_transposed=activated)
    ddown = backward_wgrad(quantized, dbias, down_kept, down_like, down_gemm, static.down_widths)

    up_kept = up_kept.with_input(partial(transpose_norm, norm, static.epsilon), x, after=dactivated)
    dnormalized, dup = backward_gemm(dhidden, dhidden_sums, up_kept, up_like, up_gemm, static.dtype, static.up_widths)
    dx, dnorm = norm_backward(dnormalized, x, norm, statistics, dy if static.residual else None)
    recorded = (
        up_gemm.record_backward(up_kept.all_amaxes(dhidden)),
        down_gemm.record_backward(down_kept.all_amaxes(quantized)),
    )
    return dx, dnorm, dup, ddown, recorded


_norm_mlp.defvjp(_forward, _backward)
