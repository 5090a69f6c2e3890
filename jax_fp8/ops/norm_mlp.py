"""norm → GEMM → activation → quantize → GEMM as one differentiable op: a Transformer's MLP.

Kept for the backward: `x` with its statistics, the input of the activation, and the FP8 residuals of both GEMMs. The
normalized and the activated tensor are not kept in bfloat16, because the backward uses both only in FP8. The kernel
that takes the gradient of the activation also makes the activated tensor again, without reading another byte. The
normalized tensor is kept in FP8, unless `recompute` makes it again.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from jax_fp8.core.checkpoint_names import name_residual
from jax_fp8.core.formats import INPUT, OUTPUT_GRADIENT
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.shards import TensorParallel
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.activation import (
    activation_amax,
    activation_backward_amax,
    activation_backward_quantize,
    activation_quantize,
)
from jax_fp8.kernels.activation_functions import activate, activate_backward
from jax_fp8.kernels.amax import as_matrix
from jax_fp8.kernels.norm import NormParameters, norm_backward, normalize
from jax_fp8.kernels.quantize import Matrices
from jax_fp8.kernels.vma import match_vma
from jax_fp8.ops.collectives import reduce_rows
from jax_fp8.ops.norm_linear import quantize_norm, transpose_norm
from jax_fp8.ops.operands import GemmInput, observe_gradient, quantize_gradient, quantize_input
from jax_fp8.ops.parameters import LinearParameters, ParamInfo
from jax_fp8.ops.passes import (
    backward_dgrad,
    backward_wgrad,
    beside_wgrad,
    forward_gemm,
    forward_rows,
    keeping_products,
    plain_linear,
    takes_activation,
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
    tensor: TensorParallel | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """`linear(activate(linear(normalize(x))))` for `x` (..., k).

    Args:
      up: with a gated activation the kernels of gate and up side by side, or one of twice the width with the gate in
        its first half.
      residual: the last GEMM adds `x` to the result, and the norm's backward kernel adds its gradient.
      recompute: normalize and quantize again in the backward instead of keeping the normalized xᵀ in FP8.
      tensor: in a step on shards, the axis over which columns of `up` and rows of `down` are split; see `linear`.

    Returns:
      (..., k) in `dtype`, and the amaxes f32[2] of the up and of the down GEMM (None without `gemms`).
    """
    x = x.astype(dtype)
    if gemms is None:

        def plain(x: jax.Array, norm: NormParameters, up: LinearParameters, down: LinearParameters) -> Matrices:
            normalized = normalize(x, norm, epsilon, dtype)[0]
            hidden: PyTree = plain_linear(normalized, up, dtype, tensor=tensor, split_dim="columns")
            added = x if residual else None
            return plain_linear(
                activate(hidden, activation), down, dtype, residual=added, tensor=tensor, split_dim="rows"
            )

        return keeping_products(plain, recompute)(x, norm, up, down), None
    static = _Static(activation, epsilon, dtype, residual, recompute, up.widths, down.widths, tensor)
    out: PyTree = _norm_mlp(static, *match_vma(as_matrix(x), norm, up, down), gemms)
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
    tensor: TensorParallel | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_mlp(
    static: _Static,
    x: jax.Array,
    norm: NormParameters,
    up: LinearParameters,
    down: LinearParameters,
    gemms: tuple[Fp8Gemm, Fp8Gemm],
):
    return _run(static, x, norm, up, down, gemms, keep=False, forward_only=True)[0]


def _run(
    static: _Static,
    x: jax.Array,
    norm: NormParameters,
    up: LinearParameters,
    down: LinearParameters,
    gemms: tuple[Fp8Gemm, Fp8Gemm],
    keep: bool,
    forward_only: bool = False,
):
    normalized, statistics = quantize_norm(x, norm, static.epsilon, gemms[0], keep, static.tensor, forward_only)
    if takes_activation(normalized, up, static.activation):
        hidden, up_amaxes, up_kept = forward_gemm(normalized, up, gemms[0], static.dtype, activation=static.activation)
        into_down = quantize_input(hidden, gemms[1], keep, forward_only), down, gemms[1], static.dtype
        y, down_amaxes, down_kept = forward_gemm(*into_down, x if static.residual else None)
        return (y, (up_amaxes, down_amaxes)), (statistics, hidden, up_kept, down_kept)
    hidden, up_amaxes, up_kept = forward_gemm(normalized, up, gemms[0], static.dtype)
    activated_cast = gemms[1].cast(INPUT, partial(activation_amax, hidden, static.activation))
    pair = activation_quantize(hidden, static.activation, activated_cast, orientations="rowwise")
    activated = GemmInput.from_cast(
        partial(activate, activation=static.activation), (hidden,), pair, activated_cast, gemms[1]
    )
    into_down = activated, down, gemms[1], static.dtype, x if static.residual else None, static.tensor
    y, down_amaxes, down_kept = forward_rows(*into_down)
    return (y, (up_amaxes, down_amaxes)), (statistics, hidden, up_kept, down_kept)


def _forward(
    static: _Static,
    x: jax.Array,
    norm: NormParameters,
    up: LinearParameters,
    down: LinearParameters,
    gemms: tuple[Fp8Gemm, Fp8Gemm],
):
    keep = not (static.recompute or up.is_frozen)
    out, (statistics, hidden, *kept) = _run(static, x, norm, up, down, gemms, keep)
    x, hidden = name_residual("norm_input", x), name_residual("mlp_hidden", hidden)
    return out, (
        x,
        norm,
        statistics,
        hidden,
        *kept,
        ParamInfo.from_arrays((x, norm)),
        ParamInfo.from_arrays(up),
        ParamInfo.from_arrays(down),
        gemms,
    )


def _backward(static: _Static, residuals: tuple, cotangents: tuple):
    x, norm, statistics, hidden, up_kept, down_kept, likes, up_like, down_like, (up_gemm, down_gemm) = residuals
    dy, _ = cotangents
    tensor = static.tensor
    quantized, dbias = quantize_gradient(dy, down_like, down_gemm, tensor)
    dactivated = backward_dgrad(quantized, down_kept, down_gemm, static.dtype)
    # One kernel: the output gradient of the GEMM up, and the input of the GEMM down again.
    measure = partial(activation_backward_amax, dactivated, hidden, static.activation)
    hidden_cast = up_gemm.cast(OUTPUT_GRADIENT, measure)
    dhidden, dhidden_sums, activated = activation_backward_quantize(
        dactivated, hidden, static.activation, hidden_cast, down_kept.x_cast
    )
    observe_gradient(
        lambda dy, x: (activate_backward(dy, x, static.activation),), (dactivated, hidden), dhidden, up_gemm
    )
    down_kept = replace(down_kept, x_transposed=activated)
    up_kept = up_kept.with_input(partial(transpose_norm, norm, static.epsilon, tensor), x, after=dactivated)

    dnormalized = reduce_rows(backward_dgrad(dhidden, up_kept, up_gemm, static.dtype), tensor)
    ddown = backward_wgrad(quantized, dbias, down_kept, down_like, down_gemm, static.down_widths)
    dup = backward_wgrad(dhidden, dhidden_sums, up_kept, up_like, up_gemm, static.up_widths)
    if tensor is not None:
        dnormalized, (ddown, dup) = beside_wgrad(dnormalized, (ddown, dup), up_gemm, down_gemm)
    dx, dnorm = norm_backward(dnormalized, x, norm, statistics, dy if static.residual else None)
    dx, dnorm = ParamInfo.place_all(likes, (dx, dnorm))
    return dx, dnorm, dup, ddown, (up_kept.record(dhidden, up_gemm), down_kept.record(quantized, down_gemm))


_norm_mlp.defvjp(_forward, _backward)
