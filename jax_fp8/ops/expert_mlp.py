"""take rows → grouped GEMM → activation → quantize → grouped GEMM → sum as one differentiable op: a layer of experts.

    x (tokens, features) ─cast, in groups→ up → activation, weights and cast, one kernel → down ─sum of rows→ y

The weights that the router gives a token's experts multiply the activated rows, before their cast. So the result is a
plain sum of rows, and its gradient is the same for all experts of a token. Nothing of `down`'s result is kept.

Where the recipe has one scale a tensor, a token is cast once, and its bytes are copied for each of its experts: in the
forward those of `x`, and in the backward those of the output gradient. Where experts are split over devices, they also
travel in FP8. Results of `down`, and input gradients of `up`, travel in `dtype`.

Where `tensor` splits each expert, its devices have the same rows and a part of the hidden features. Their results are
parts of sums, as those of ops/norm_mlp.py, and so are the gradients of `x` and of the weights.

The kernels that activate and cast are those of ops/norm_mlp.py, which treat rows in groups as any other matrix. Kept
for the backward: the input of the activation, and the FP8 residuals of both GEMMs, for all rows. With `recompute` the
tokens are kept instead of the FP8 input of `up`; that saves memory where something else keeps them anyway.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from jax_fp8.core.cast import Cast
from jax_fp8.core.checkpoint_names import name_residual
from jax_fp8.core.formats import INPUT, OUTPUT_GRADIENT
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.shards import TensorParallel
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.activation import (
    activation_amax,
    activation_backward_amax,
    activation_backward_quantize,
    activation_quantize,
)
from jax_fp8.kernels.activation_functions import activate, activate_backward, row_weights_gradient
from jax_fp8.kernels.amax import amax
from jax_fp8.kernels.quantize import quantize_rowwise, quantize_transpose
from jax_fp8.kernels.vma import match_vma
from jax_fp8.ops.collectives import enter, gather_pair, gather_rows, leave, own_rows, reduce_rows, whole_pair
from jax_fp8.ops.expert_rows import (
    ExpertRows,
    choices_of_rows,
    combine_rows,
    take_own_rows_of_fp8,
    take_rows,
    tokens_with_rows,
    weights_of_rows,
)
from jax_fp8.ops.expert_travel import send_rows
from jax_fp8.ops.grouped_linear import (
    backward_dgrad,
    backward_wgrad,
    check_kernels,
    forward_experts,
    plain_grouped_linear,
    widths_of,
)
from jax_fp8.ops.operands import GemmInput, observe_gradient, quantize_gradient, quantize_input
from jax_fp8.ops.parameters import LinearParameters, ParamInfo
from jax_fp8.ops.passes import keeping_products


def expert_mlp(
    x: jax.Array,
    weights: jax.Array,
    where: ExpertRows,
    up: LinearParameters,
    down: LinearParameters,
    gemms: tuple[Fp8Gemm, Fp8Gemm] | None,
    activation: str = "gelu",
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    residual: jax.Array | None = None,
    recompute: bool = False,
    tensor: TensorParallel | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """`Σ down(weight · activate(up(x)))` over the experts of every token.

    Args:
      x: (tokens, k).
      weights: f32[tokens, choices], those of a token's experts.
      where: the result of `sort_tokens`.
      up, down: kernels (experts, k, n) and (experts, n, k); of a gated activation those of gate and up side by side.
      gemms: how to quantize for `up` and `down`, or None for plain products in `dtype`.
      residual: (tokens, k) in `dtype`, added before the sum is rounded.
      recompute: keep `x`, and sort and quantize it again in the backward, instead of keeping its rows in FP8.
      tensor: the axis that splits each expert: `up` by columns, `down` by rows. With sequence parallelism `x`,
        `weights`, `residual` and the result have this device's own tokens, and `where` is of all tokens.

    Returns:
      (tokens, k) in `dtype`, and the amaxes f32[2] of the up and of the down GEMM (None without `gemms`).
    """
    x = x.astype(dtype)
    check_kernels(up)
    check_kernels(down)
    if gemms is None:

        def plain(
            x: jax.Array, weights: jax.Array, up: LinearParameters, down: LinearParameters, where: ExpertRows
        ) -> jax.Array:
            hidden = plain_grouped_linear(take_rows(enter(x, tensor), where), up, where, dtype)
            activated = activate(hidden, activation, weights_of_rows(enter(weights, tensor), where))
            return _combine(plain_grouped_linear(activated, down, where, dtype), where, residual, tensor)

        return keeping_products(plain, recompute)(x, weights, up, down, where), None
    static = _Static(activation, dtype, recompute, widths_of(up), widths_of(down), tensor)
    x, weights, up, down = match_vma(x, weights, up, down)
    return _expert_mlp(static, x, weights, where, up, down, gemms, residual)


@dataclass(frozen=True)
class _Static:
    activation: str
    dtype: jax.typing.DTypeLike
    recompute: bool
    up_widths: tuple[int, ...]
    down_widths: tuple[int, ...]
    tensor: TensorParallel | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_mlp(
    static: _Static,
    x: jax.Array,
    weights: jax.Array,
    where: ExpertRows,
    up: LinearParameters,
    down: LinearParameters,
    gemms: tuple[Fp8Gemm, Fp8Gemm],
    residual: jax.Array | None,
):
    return _run(static, x, weights, where, up, down, gemms, residual, keep=False)[0]


def _run(
    static: _Static,
    x: jax.Array,
    weights: jax.Array,
    where: ExpertRows,
    up: LinearParameters,
    down: LinearParameters,
    gemms: tuple[Fp8Gemm, Fp8Gemm],
    residual: jax.Array | None,
    keep: bool,
):
    rows = _input_rows(x, where, gemms[0], static.tensor, keep)
    row_weights = weights_of_rows(gather_rows(weights, static.tensor), where)
    hidden, up_amaxes, up_kept = forward_experts(rows, up, where.starts, gemms[0], static.dtype)
    activated_cast = gemms[1].cast(INPUT, partial(activation_amax, hidden, static.activation, row_weights))
    pair = activation_quantize(hidden, static.activation, activated_cast, row_weights, orientations="rowwise")
    activated = GemmInput.from_cast(
        lambda hidden, weights: activate(hidden, static.activation, weights),
        *((hidden, row_weights), pair, activated_cast, gemms[1]),
    )
    down_rows, down_amaxes, down_kept = forward_experts(activated, down, where.starts, gemms[1], static.dtype)
    y = _combine(down_rows, where, residual, static.tensor)
    return (y, (up_amaxes, down_amaxes)), (row_weights, hidden, up_kept, down_kept)


def _forward(
    static: _Static,
    x: jax.Array,
    weights: jax.Array,
    where: ExpertRows,
    up: LinearParameters,
    down: LinearParameters,
    gemms: tuple[Fp8Gemm, Fp8Gemm],
    residual: jax.Array | None,
):
    keep = not static.recompute
    out, (row_weights, hidden, *kept) = _run(static, x, weights, where, up, down, gemms, residual, keep)
    hidden = name_residual("mlp_hidden", hidden)
    return out, (
        x if static.recompute else None,
        where,
        row_weights,
        hidden,
        *kept,
        ParamInfo.from_arrays((x, weights, residual)),
        ParamInfo.from_arrays(up),
        ParamInfo.from_arrays(down),
        gemms,
    )


def _backward(static: _Static, residuals: tuple, cotangents: tuple):
    x, where, row_weights, hidden, up_kept, down_kept, likes, up_like, down_like, (up_gemm, down_gemm) = residuals
    dy, _ = cotangents
    activation, starts, tensor = static.activation, where.starts, static.tensor
    dy_rows = _gradient_rows(dy, where, down_like, down_gemm, tensor)
    dactivated = backward_dgrad(dy_rows, down_kept, starts, down_gemm, static.dtype)
    measure = partial(activation_backward_amax, dactivated, hidden, activation, row_weights)
    hidden_cast = up_gemm.cast(OUTPUT_GRADIENT, measure)
    dhidden, _, activated = activation_backward_quantize(
        dactivated, hidden, activation, hidden_cast, down_kept.x_cast, row_weights
    )
    observe_gradient(
        lambda dy, x, weights: (activate_backward(dy, x, activation, weights),),
        *((dactivated, hidden, row_weights), dhidden, up_gemm),
    )
    dweights = choices_of_rows(row_weights_gradient(dactivated, hidden, activation), where)
    down_kept = replace(down_kept, x_transposed=activated)
    up_kept = up_kept.with_input(partial(_rows_again, where, tensor), x, after=dactivated)
    drows = backward_dgrad(dhidden, up_kept, starts, up_gemm, static.dtype)
    ddown = backward_wgrad(dy_rows, down_kept, down_like, starts, down_gemm, static.down_widths)
    dup = backward_wgrad(dhidden, up_kept, up_like, starts, up_gemm, static.up_widths)
    recorded = up_kept.record(dhidden, up_gemm), down_kept.record(dy_rows, down_gemm)
    sums = [reduce_rows(of_tokens, tensor) for of_tokens in (combine_rows(drows, where), dweights)]
    dx, dweights, dresidual = ParamInfo.place_all(likes, (*sums, None if likes[2] is None else dy))
    return dx, dweights, None, dup, ddown, recorded, dresidual


_expert_mlp.defvjp(_forward, _backward)


def _combine(
    rows: jax.Array, where: ExpertRows, residual: jax.Array | None, tensor: TensorParallel | None
) -> jax.Array:
    """The sum of each token's rows, over the devices of `tensor` too, and the residual."""
    if tensor is None:
        return combine_rows(rows, where, residual)
    y: PyTree = leave(combine_rows(rows, where), tensor)
    return y if residual is None else y + residual


# ---- rows in FP8 -----------------------------------------------------------------------------------------------------


def _input_rows(x: jax.Array, where: ExpertRows, gemm: Fp8Gemm, tensor: TensorParallel | None, keep: bool) -> GemmInput:
    """The rows of tokens in groups, in FP8. With one scale a tensor the tokens are cast, and then copied. With scales
    by tile their rows are cast: tiles of the transpose lie along a group.
    """
    if _is_by_tile(x, INPUT, gemm):
        return quantize_input(take_rows(gather_rows(x, tensor), where), gemm, keep)
    tokens = quantize_input(_with_rows(x, where, tensor), gemm, keep=False).gathered(tensor, keep=False)
    return replace(tokens, pair=_rows_of(tokens.pair, where, keep))


def _gradient_rows(
    dy: jax.Array, where: ExpertRows, like: LinearParameters, gemm: Fp8Gemm, tensor: TensorParallel | None
) -> Fp8Pair:
    """The same of the output gradient (tokens, features), in both orientations."""
    if _is_by_tile(dy, OUTPUT_GRADIENT, gemm):
        return quantize_gradient(take_rows(gather_rows(dy, tensor), where), like, gemm)[0]
    tokens, _ = quantize_gradient(_with_rows(dy, where, tensor), like, gemm, tensor, keep=False)
    return _rows_of(tokens, where, keep=True)


def _is_by_tile(tokens: jax.Array, tensor: int, gemm: Fp8Gemm) -> bool:
    """Whether the tensor of a GEMM, INPUT or OUTPUT_GRADIENT, is cast with scales by tile."""
    return gemm.cast(tensor, partial(amax, tokens)).rule.tile is not None


def _with_rows(own: jax.Array, where: ExpertRows, tensor: TensorParallel | None) -> jax.Array:
    """This device's own tokens, with zeros for those that have no row."""
    return tokens_with_rows(own, replace(where, rows=own_rows(where.rows, tensor)))


def _rows_again(where: ExpertRows, tensor: TensorParallel | None, x: jax.Array, cast: Cast) -> Fp8Pair:
    """The rows of `_input_rows` in both orientations, by the cast that they had."""
    if cast.rule.tile is not None:
        return quantize_transpose(take_rows(gather_rows(x, tensor), where), cast)
    return _rows_of(gather_pair(quantize_rowwise(x, cast), tensor, keep=False), where, keep=True)


def _rows_of(tokens: Fp8Pair, where: ExpertRows, keep: bool) -> Fp8Pair:
    """The rows of tokens with one scale in the groups of their experts, with `keep` in both orientations."""
    cast, travel = tokens.rowwise, where.travel
    taken = take_own_rows_of_fp8(cast.values, where, transposes=keep and travel is None)
    if travel is not None:
        return whole_pair(replace(cast, values=send_rows(taken[0], travel)), tokens, keep)
    if keep:
        return Fp8Pair.with_shared_scale(taken[0], taken[1], cast.scale, tokens.amax)
    return Fp8Pair(replace(cast, values=taken[0]), None, tokens.amax)
