"""Attention in FP8 inside a layer: the states of its GEMMs, and the cases that it refuses.

fp8/<layer>/{~scores, ~values, ~gradients}/{scale, amax_history}      see ops/fp8_attention.py
"""

from dataclasses import replace

import jax

from jax_fp8.core.formats import INPUT
from jax_fp8.core.paths import kernelless_name
from jax_fp8.core.recipe_rules import recipe_at
from jax_fp8.kernels.fp8_attention import check_head_dim, check_tokens
from jax_fp8.nn.checks import layer_name
from jax_fp8.nn.gemm import GemmState
from jax_fp8.nn.multi_head import MultiHead
from jax_fp8.ops.attention import attention
from jax_fp8.ops.fp8_attention import AttentionGemms, fp8_attention
from jax_fp8.ops.parameters import LinearParameters

STATES = ("scores", "values", "gradients")


def attend_in_fp8(
    module: MultiHead,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    implementation: str,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    lengths: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    scale: float | None = None,
    logit_cap: float | None = None,
) -> jax.Array:
    """Attention of (batch, seq, heads, head_dim) in FP8, with the state of `module`.

    `module.init` computes attention in 16 bits instead, so that its sequences may have any length.

    Args:
      implementation: "cudnn" or "xla", as `attention` takes it.
      window, ...: the other arguments of `attention`. FP8 attention has none of them, and refuses each that is set.
    """
    layer = layer_name(module)
    refused = {
        "sliding_window": window,
        "segment_ids": segment_ids,
        "lengths": lengths,
        "key_segment_ids": key_segment_ids,
        "key_lengths": key_lengths,
        "dropout_rate": dropout_rate or None,
        "dropout_key": dropout_key,
        "attention_scale": None if scale == query.shape[-1] ** -0.5 else scale,
        "attention_logit_cap": logit_cap,
    }
    _check(module, layer, [name for name, value in refused.items() if value is not None])
    check_head_dim(layer, query.shape[-1])
    no_kernels = LinearParameters((), None)
    declared = [
        GemmState(recipe_at(module.recipe, module.path), f"{layer}/{name}", name=kernelless_name(name))(
            no_kernels, None
        )
        for name in STATES
    ]
    if module.is_initializing():  # `init` discards the result
        by = implementation if jax.default_backend() == "gpu" else "xla"
        return attention(query, key, value, causal=causal, implementation=by)
    check_tokens(layer, query.shape[-3], key.shape[-3])
    scores, values, gradients = declared
    # Scales of attention weights are constant, so the input row of the state "values" has no tensor.
    assert scores.fp8 and values.fp8 and gradients.fp8  # each has a recipe
    gemms = AttentionGemms(scores.fp8, replace(values.fp8, unused=(INPUT,)), gradients.fp8)
    attended, (scores_amaxes, values_amaxes) = fp8_attention(
        query, key, value, gemms, causal=causal, implementation=implementation
    )
    scores.stage(scores_amaxes)
    replace(values, fp8=gemms.values).stage(values_amaxes)
    return attended


def _check(module: MultiHead, layer: str, refused: list[str]) -> None:
    recipe, implementation = recipe_at(module.recipe, module.path), module.implementation
    if recipe is None or not recipe.has_state:
        raise ValueError(
            f"{layer}: FP8 attention needs DelayedScaling, because its kernel must know the scales of gradients before "
            f"it computes them, got recipe={recipe!r}; change the recipe, or use fp8_attention=False"
        )
    if implementation == "xla":
        raise ValueError(
            f'{layer}: FP8 attention is cuDNN\'s on a GPU, got implementation="xla" (attention_implementation="xla" of '
            "a GPT or a TransformerBlock); leave it out, or use fp8_attention=False"
        )
    if refused:
        raise ValueError(
            f"{layer}: cuDNN's attention in FP8 has no windows, padding, documents, dropout, scale or cap, got "
            f"{' and '.join(refused)}; leave that out, or use fp8_attention=False"
        )
