"""Attention with dropout of its weights or a cap on its logits, as XLA computes it (https://arxiv.org/abs/1706.03762):

    logits  = cap(query · keyᵀ · scale)       cap(x) = c tanh(x / c)   (https://arxiv.org/abs/2408.00118)
    weights = softmax(logits) where a query sees a key                          float32, rounded once
    out     = dropout(weights) · value

The weights (batch, heads, seq, keys) are an array in memory here, which a fused kernel avoids. cuDNN has dropout too,
but XLA gives it a seed that is a constant of the program, and a counter on the host that each launch of a plan
increments. A launch recorded in a CUDA graph, layers that share a plan and a recomputed forward would get wrong masks,
so cuDNN is not used. It has no cap either.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.ops.capped import capped
from jax_fp8.ops.dropout import dropout


def dropped_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rate: float,
    random_key: jax.Array | None,
    *,
    is_causal: bool,
    local_window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    logit_cap: float | None = None,
    mask: jax.Array | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
) -> jax.Array:
    """`jax.nn.dot_product_attention` of (batch, seq, heads, head_dim) that drops each weight with probability `rate`,
    if there is a `random_key`, and caps logits, if there is a `logit_cap`.

    A query that sees no key, or is padding, has zeros as its result. Other arguments are those of JAX's function.
    """
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(part, group, axis=2) for part in (key, value))
    pairs = 1, 1, query.shape[1], key.shape[1]
    own, other = (lax.broadcasted_iota(jnp.int32, pairs, dim) for dim in (2, 3))
    sees = (other <= own) if is_causal else jnp.ones(pairs, bool)
    if local_window_size is not None:
        sees &= other >= own - local_window_size[0]
    if mask is not None:
        sees &= mask
    for lengths, number in ((query_seq_lengths, own), (key_value_seq_lengths, other)):
        if lengths is not None:
            sees &= number < lengths[:, None, None, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    scores = capped(scores * (query.shape[-1] ** -0.5 if scale is None else scale), logit_cap)
    scores = jnp.where(sees, scores, jnp.finfo(jnp.float32).min)
    weights = jnp.where(sees, jax.nn.softmax(scores), 0).astype(query.dtype)
    weights = weights if random_key is None else dropout(weights, random_key, rate)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def check_drops_weights(implementation: str | None, of: str = "attention") -> None:
    """Raise if cuDNN would have to drop attention weights; `of` names the layer in the message."""
    if implementation == "cudnn":
        raise ValueError(
            f"{of}: cuDNN's attention cannot drop weights with a new mask in every step, so "
            'attention_dropout_rate needs implementation="xla" (attention_implementation="xla" of a GPT or a '
            "TransformerBlock), got cuDNN; pass that, or attention_dropout_rate=0"
        )


def check_caps_logits(implementation: str | None, of: str = "attention") -> None:
    """Raise if cuDNN would have to cap attention logits; `of` names the layer in the message."""
    if implementation == "cudnn":
        raise ValueError(
            f'{of}: cuDNN\'s attention cannot cap logits, so attention_logit_cap needs implementation="xla" '
            '(attention_implementation="xla" of a GPT or a TransformerBlock) or None, got cuDNN; pass one of these'
        )
