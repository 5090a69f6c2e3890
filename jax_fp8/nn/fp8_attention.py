"""Attention in FP8 inside a layer: its states, and what it refuses.

fp8/<layer>/{~scores, ~values, ~gradients}/{scale, amax_history}      see ops/fp8_attention.py
"""

from dataclasses import replace
from typing import Any

import jax

from jax_fp8.core.formats import INPUT
from jax_fp8.core.paths import kernelless_name
from jax_fp8.kernels.fp8_attention import check_head_dim, check_tokens
from jax_fp8.nn.checks import layer_name
from jax_fp8.nn.gemm import GemmState
from jax_fp8.ops.attention import attention
from jax_fp8.ops.fp8_attention import AttentionGemms, fp8_attention
from jax_fp8.ops.parameters import LinearParameters

STATES = ("scores", "values", "gradients")


def attend_in_fp8(
    module: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    implementation: str,
    window: int | None = None,
    **told: Any,
) -> jax.Array:
    """Attention of (batch, seq, heads, head_dim) in FP8, with the state of `module`. While its variables are made, in
    16 bits, so that any length will do.

    Args:
      implementation: who computes attention here.
      window, told: what else `attention` takes; anything but None is refused.
    """
    layer = layer_name(module)
    _check(module, layer, {"sliding_window": window, **told})
    check_head_dim(layer, query.shape[-1])
    no_kernels = LinearParameters((), None)
    declared = [
        GemmState(module.recipe, f"{layer}/{name}", name=kernelless_name(name))(no_kernels, None) for name in STATES
    ]
    if module.is_initializing():  # nobody keeps what comes out
        by = implementation if jax.default_backend() == "gpu" else "xla"
        return attention(query, key, value, causal=causal, implementation=by)
    check_tokens(layer, query.shape[-3], key.shape[-3])
    scores, values, gradients = declared
    of_product: Any = values.fp8
    values = replace(values, fp8=replace(of_product, unused=(INPUT,)))  # what it multiplies by values has no row
    of_states: Any = scores.fp8, values.fp8, gradients.fp8
    attended, (of_scores, of_values) = fp8_attention(
        query, key, value, AttentionGemms(*of_states), causal=causal, implementation=implementation
    )
    scores.stage(of_scores)
    values.stage(of_values)
    return attended


def _check(module: Any, layer: str, told: dict[str, Any]) -> None:
    recipe, wanted = module.recipe, module.implementation
    if recipe is None or not recipe.has_state:
        raise ValueError(
            f"{layer}: FP8 attention needs DelayedScaling, for its kernel casts gradients whose scales must be known "
            f"before they are, got recipe={recipe!r}; change the recipe, or use fp8_attention=False"
        )
    if wanted == "xla":
        raise ValueError(
            f'{layer}: FP8 attention is cuDNN\'s on a GPU, got implementation="xla" (attention_implementation="xla" of '
            "a GPT or a TransformerBlock); leave it out, or use fp8_attention=False"
        )
    given = [name for name, value in told.items() if value is not None]
    if given:
        raise ValueError(
            f"{layer}: cuDNN's attention in FP8 knows neither windows, padding nor documents and drops nothing, got "
            f"{' and '.join(given)}; leave that out, or use fp8_attention=False"
        )
