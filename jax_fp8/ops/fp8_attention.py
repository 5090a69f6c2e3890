"""Attention in FP8: bfloat16 in and out, E4M3 between, with the state of delayed scaling.

    query, key, value ─cast→ attend ─dequantize→ attended          doutput ─cast→ attend_backward ─dequantize→ gradients

The tensors of attention are the rows of three states, as of three GEMMs:

    state        input      kernel    output gradient
    scores       query      key       dscores, which the kernel casts
    values       -          value     doutput
    gradients    dquery     dkey      dvalue                all three cast by the kernel

The attention weights have a constant scale and no row; the scale of the output follows from that of the values. All
tensors are E4M3, also in rows that the recipe counts as output gradients: 57,344 / 448 is 128, so the scale of E5M2
times 128 is exactly that of E4M3.

Tensors that the kernel casts need scales from earlier steps. Without such scales (in a warm start, or under a plain
`jax.grad`, whose amaxes reach no state) the backward runs three times: once for the amaxes of dscores and dvalue, which
depend on no scale, once for those of dquery and dkey, and then with all four.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from jax_fp8.core.cast import Cast
from jax_fp8.core.checkpoint_names import name_residual
from jax_fp8.core.formats import E4M3, INPUT, KERNEL, OUTPUT_GRADIENT, fp8_max
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.core.shards import largest_amax
from jax_fp8.kernels.amax import amax
from jax_fp8.kernels.fp8_attention import attend, attend_backward
from jax_fp8.kernels.quantize import quantize_rowwise
from jax_fp8.kernels.vma import match_vma
from jax_fp8.ops.attention import as_heads, tied
from jax_fp8.ops.parameters import ParamInfo


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionGemms:
    """The states of one attention, each as of a GEMM; all of one recipe, `DelayedScaling`."""

    scores: Fp8Gemm
    values: Fp8Gemm
    gradients: Fp8Gemm


def fp8_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    gemms: AttentionGemms,
    *,
    causal: bool,
    implementation: str | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Attend in FP8; arrays may be split over a mesh by batches and by heads.

    Args:
      query: (batch, seq, heads, 128), or without batch.
      key, value: (batch, keys, kv_heads, 128).
      implementation: "cudnn" where this is compiled for a GPU, as of `attention`.

    Returns:
      (batch, seq, heads, 128) in the dtype of `query`; and the amaxes f32[2] of inputs and kernels, of `scores` and of
      `values`.
    """
    if query.ndim == 3:
        attended, amaxes = fp8_attention(
            query[None], key[None], value[None], gemms, causal=causal, implementation=implementation
        )
        return attended[0], amaxes
    static = _Static(causal, implementation == "cudnn", key.shape[2])
    return _fp8_attention(static, *match_vma(query, key, value), gemms)


@dataclass(frozen=True)
class _Static:
    causal: bool
    by_cudnn: bool
    kv_heads: int

    def tied(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Operands or results of cuDNN's attention, which the compiler has to split alike."""
        return tied(self.kv_heads, *arrays) if self.by_cudnn else arrays


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fp8_attention(static: _Static, query: jax.Array, key: jax.Array, value: jax.Array, gemms: AttentionGemms) -> tuple:
    return _forward(static, query, key, value, gemms)[0]


def _forward(static: _Static, query: jax.Array, key: jax.Array, value: jax.Array, gemms: AttentionGemms):
    likes = ParamInfo.from_arrays((query, key, value))
    query, key, value = static.tied(query, key, value)
    tensors = (gemms.scores, INPUT, query), (gemms.scores, KERNEL, key), (gemms.values, KERNEL, value)
    operands, (of_query, of_key, of_value) = zip(*(_quantize(*of) for of in tensors), strict=True)
    operands = tuple(replace(of, values=name_residual("attention_operands", of.values)) for of in operands)
    output, statistics = attend(*operands, causal=static.causal)
    amaxes = jnp.stack([of_query, of_key]), jnp.stack([jnp.zeros_like(of_value), of_value])
    (attended,) = static.tied(output.dequantize(query.dtype))
    return (attended, amaxes), (operands, output, statistics, amaxes, gemms, likes)


def _backward(static: _Static, kept: tuple, cotangents: tuple):
    operands, output, statistics, (of_scores, of_values), gemms, likes = kept
    doutput, of_doutput = _quantize(gemms.values, OUTPUT_GRADIENT, *static.tied(cotangents[0]))
    run = partial(attend_backward, *operands, output, statistics, doutput, causal=static.causal)
    gradients, (of_dscores, *of_results) = run(_gradient_scales(gemms, run))
    left = AttentionGemms(
        gemms.scores.record_backward(jnp.append(of_scores, of_dscores)),
        gemms.values.record_backward(jnp.append(of_values, of_doutput)),
        gemms.gradients.record_backward(jnp.stack(of_results)),
    )
    found = static.tied(*(of.dequantize(like.dtype) for of, like in zip(gradients, likes, strict=True)))
    return *(like.place(of) for of, like in zip(found, likes, strict=True)), left


_fp8_attention.defvjp(_forward, _backward)


def _quantize(gemm: Fp8Gemm, tensor: int, x: jax.Array) -> tuple[Fp8Array, jax.Array]:
    """(batch, seq, heads, features) in E4M3 by the recipe, and its amax f32[]."""
    rows = x.reshape(*x.shape[:2], -1)
    pair = quantize_rowwise(rows, _in_e4m3(gemm.cast(tensor, partial(amax, rows))))
    return Fp8Array(as_heads(pair.rowwise.values, x.shape[-1]), pair.rowwise.scale), pair.amax


def _in_e4m3(cast: Cast) -> Cast:
    """The same cast, with the whole range of E4M3."""
    rule = cast.rule
    if rule.dtype == E4M3:
        return cast
    if rule.formula is not None:
        return replace(cast, rule=replace(rule, dtype=E4M3))
    return Cast.with_scale(E4M3, cast.known_scale * (fp8_max(rule.dtype) / fp8_max(E4M3)))


def _gradient_scales(gemms: AttentionGemms, run: Callable[..., tuple]) -> tuple[jax.Array, ...]:
    """Scales of the tensors that the backward kernel casts: dscores, dquery, dkey and dvalue."""
    rows = (gemms.scores, OUTPUT_GRADIENT), *((gemms.gradients, row) for row in (INPUT, KERNEL, OUTPUT_GRADIENT))
    if all(gemm.scales is not None and gemm.is_recorded for gemm, _ in rows):
        return tuple(_in_e4m3(gemm.cast(row, _known)).known_scale for gemm, row in rows)
    formula = ScaleFormula(margin=gemms.scores.recipe.margin)  # type: ignore[attr-defined]

    def scales_of(amaxes: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(
            formula(largest_amax(of, gemm.amax_axes), E4M3) for of, (gemm, _) in zip(amaxes, rows, strict=True)
        )

    some = (jnp.ones((), jnp.float32),) * len(rows)
    return scales_of(run(scales_of(run(some)[1]))[1])


def _known() -> jax.Array:
    raise AssertionError("a scale of the state needs no amax")
