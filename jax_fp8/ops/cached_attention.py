"""Attention to tokens that were read before: the keys and values of a layer, kept while a text is written.

    slot    0 ... length - 1        ... prompt_slots - 1    prompt_slots + i
    has     the prompt of a row     padding                 the new token i of every row

A query sees the prompt of its row, and the new tokens up to its own. Prompts have several lengths, and yet new tokens
stand in the same slot of all rows: one write in one place. A slot is not a position; that is in the key already
(rotary), or in what was added to the embedding (learned).

Padding has the query, key and value of the first token of its row, and is given that token's result, too. So it is that
token over and over, in every layer: it adds nothing to an amax, and a scale is what it would be without.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.ops.attention import attention


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyValueCache:
    """What one layer keeps.

    Args:
      key, value: (batch, kv_heads, slots, head_dim), so that a head's slots are one block of memory.
      lengths: i32[batch], of the prompts.
      step: i32[], the number of the new token that is read; None: prompts are read.
      prompt_slots: of the prompts and their padding; static.
    """

    key: jax.Array
    value: jax.Array
    lengths: jax.Array
    step: jax.Array | None
    prompt_slots: int = field(metadata={"static": True})

    @property
    def positions(self) -> jax.Array:
        return positions_of(self.lengths, self.prompt_slots, self.step)


def positions_of(lengths: jax.Array, prompt_slots: int, step: jax.Array | None) -> jax.Array:
    """The positions of what is read, i32[batch, seq], with the words of `KeyValueCache`; those of padding are 0, as of
    its row's first token.
    """
    if step is not None:
        return (lengths + step)[:, None]
    return jnp.where(is_token(lengths, prompt_slots), jnp.arange(prompt_slots, dtype=jnp.int32)[None], 0)


def is_token(lengths: jax.Array, prompt_slots: int) -> jax.Array:
    """Which slots of prompts are not padding, bool[batch, prompt_slots]."""
    return jnp.arange(prompt_slots, dtype=jnp.int32)[None] < lengths[:, None]


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: KeyValueCache,
    *,
    implementation: str | None,
    window: int | None = None,
) -> tuple[jax.Array, KeyValueCache]:
    """Attention of what is read, (batch, seq, heads, head_dim), to itself and to what is in the cache;
    and the cache with its keys and values (batch, seq, kv_heads, head_dim). `window` is as for `attention`.

    Prompts are attended to as in training. A new token is one row of each head: a product of a vector, left to XLA.
    """
    first = jnp.int32(0) if cache.step is None else cache.prompt_slots + cache.step
    kept = replace(cache, key=_write(cache.key, key, first), value=_write(cache.value, value, first))
    if cache.step is not None:
        return _attend(query, kept, cache.step, window), kept
    attended = attention(query, key, value, causal=True, implementation=implementation, window=window)
    is_own = is_token(cache.lengths, cache.prompt_slots)[:, :, None, None]
    return jnp.where(is_own, attended, attended[:, :1]), kept


def _seen(cache, step, window) -> jax.Array:
    """Which slots the new token of each row sees, bool[batch, slots]."""
    lengths, own = cache.lengths[:, None], cache.lengths[:, None] + step
    in_prompt = jnp.arange(cache.prompt_slots, dtype=jnp.int32)[None]
    new = lengths + jnp.arange(cache.key.shape[2] - cache.prompt_slots, dtype=jnp.int32)[None]
    seen = jnp.concatenate([in_prompt < lengths, new <= own], axis=1)
    if window is None:
        return seen
    positions = jnp.concatenate([jnp.broadcast_to(in_prompt, (len(lengths), in_prompt.size)), new], axis=1)
    return seen & (positions > own - window)


def _write(slots, new, first) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(slots, new.swapaxes(1, 2).astype(slots.dtype), first, axis=2)


def _attend(query, cache, step, window) -> jax.Array:
    """One query of each row and head, (batch, 1, heads, head_dim), to the cache; softmax in float32."""
    batch, _, heads, head_dim = query.shape
    kv_heads = cache.key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    into_float32 = {"preferred_element_type": jnp.float32}
    logits = jnp.einsum("bkgd,bksd->bkgs", grouped, cache.key, **into_float32) / jnp.float32(head_dim**0.5)
    seen = _seen(cache, step, window)
    logits = jnp.where(seen[:, None, None, :], logits, -jnp.inf)  # at least its own
    weights = jax.nn.softmax(logits, axis=-1).astype(query.dtype)
    attended = jnp.einsum("bkgs,bksd->bkgd", weights, cache.value, **into_float32)
    return attended.astype(query.dtype).reshape(query.shape)
