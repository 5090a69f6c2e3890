"""Attention to earlier tokens while text is generated: a layer's cache of keys and values.

    slot    0 ... length - 1        ... prompt_slots - 1    prompt_slots + i
    has     the prompt of a row     padding                 the new token i of every row

A query sees the prompt of its row, and the new tokens up to its own. Prompts differ in length, but new token i has the
same slot in all rows, so that one slice update writes it. A slot is not a position: the position is already in the key
(rotary), or was added to the embedding (learned).

Padding has the query, key and value of its row's first token, and gets that token's result. So in every layer padding
repeats that token: it changes no amax, and scales are those of the prompts without padding.

In FP8, each key and each value of a head has a scale of its own, from its amax. Logits are multiplied by the scales of
keys in float32, and softmax weights by those of values.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.scale import scale_from_amax
from jax_fp8.kernels.cached_attention import attend_to_cache, is_chosen
from jax_fp8.kernels.casting import quantize_reference
from jax_fp8.ops.attention import attention
from jax_fp8.ops.capped import capped

Slots = jax.Array | Fp8Array  # keys or values (batch, kv_heads, slots, head_dim); in FP8 one scale for each slot


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyValueCache:
    """The keys and values of one layer.

    Args:
      key, value: (batch, kv_heads, slots, head_dim), so that a head's slots are one block of memory. As `empty_slots`
        makes them.
      lengths: i32[batch], of the prompts.
      step: i32[], the number of the new token; None while prompts are read.
      prompt_slots: slots of the prompts with their padding; static.
    """

    key: Slots
    value: Slots
    lengths: jax.Array
    step: jax.Array | None
    prompt_slots: int = field(metadata={"static": True})

    @property
    def positions(self) -> jax.Array:
        return positions_of(self.lengths, self.prompt_slots, self.step)


def empty_slots(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Slots:
    """Slots (batch, kv_heads, slots, head_dim) of zeros, in a float dtype or E4M3."""
    values = jnp.zeros(shape, dtype)
    return Fp8Array(values, jnp.ones((*shape[:-1], 1), jnp.float32)) if dtype == E4M3 else values


def positions_of(lengths: jax.Array, prompt_slots: int, step: jax.Array | None) -> jax.Array:
    """The positions of the tokens that are read, i32[batch, seq]; arguments as in `KeyValueCache`. Padding has
    position 0, that of its row's first token.
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
    scale: float | None = None,
    logit_cap: float | None = None,
) -> tuple[jax.Array, KeyValueCache]:
    """Attention of the tokens that are read to themselves and to the cache.

    A prompt attends as in training. A new token is one row of each head, a product with a vector, which XLA computes.

    Args:
      query: (batch, seq, heads, head_dim).
      key, value: (batch, seq, kv_heads, head_dim), written into the cache.
      window, scale, logit_cap: as for `attention`.

    Returns:
      Like `query`, and the cache with the new keys and values.
    """
    first = jnp.int32(0) if cache.step is None else cache.prompt_slots + cache.step
    updated = replace(cache, key=_write(cache.key, key, first), value=_write(cache.value, value, first))
    if cache.step is not None:
        return _attend(query, updated, cache.step, window, scale, logit_cap), updated
    attended = attention(
        query,
        key,
        value,
        causal=True,
        implementation=implementation,
        window=window,
        scale=scale,
        logit_cap=logit_cap,
    )
    is_own = is_token(cache.lengths, cache.prompt_slots)[:, :, None, None]
    return jnp.where(is_own, attended, attended[:, :1]), updated


def attend_token(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: KeyValueCache,
    *,
    rotary: tuple[jax.Array, jax.Array] | None = None,
    window: int | None = None,
    scale: float | None = None,
    logit_cap: float | None = None,
) -> tuple[jax.Array, KeyValueCache]:
    """`cached_attention` of one new token of each row, (batch, 1, ...), by one kernel, which also rotates.

    Args:
      rotary: cosines and sines of the new tokens (batch, 1, rotated / 2); None: no rotation.
    """
    assert cache.step is not None, "a new token has a number"
    keys, key_scales = _as_arrays(cache.key)
    values, value_scales = _as_arrays(cache.value)
    found = attend_to_cache(
        query[:, 0],
        key[:, 0],
        value[:, 0],
        keys,
        values,
        cache.lengths,
        cache.step,
        prompt_slots=cache.prompt_slots,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        logit_cap=logit_cap,
        rotary=None if rotary is None else (rotary[0][:, 0], rotary[1][:, 0]),
        key_scales=key_scales,
        value_scales=value_scales,
    )
    return found.attended[:, None], replace(
        cache,
        key=_with_scales(found.keys, found.key_scales),
        value=_with_scales(found.values, found.value_scales),
    )


def _as_arrays(slots: Slots) -> tuple[jax.Array, jax.Array | None]:
    """The values, and in FP8 the scales (batch, kv_heads, slots)."""
    return (slots.values, slots.scale[..., 0]) if isinstance(slots, Fp8Array) else (slots, None)


def _with_scales(slots: jax.Array, scales: jax.Array | None) -> Slots:
    return slots if scales is None else Fp8Array(slots, scales[..., None])


def reads_token_by_kernel(query: jax.Array, cache: KeyValueCache) -> bool:
    """Whether `attend_token` is to read these queries (batch, seq, heads, head_dim)."""
    return cache.step is not None and is_chosen(query[:, 0], cache.key.shape[1])


def _seen(cache: KeyValueCache, step: jax.Array, window: int | None) -> jax.Array:
    """Which slots the new token of each row sees, bool[batch, slots]."""
    lengths, own = cache.lengths[:, None], cache.lengths[:, None] + step
    in_prompt = jnp.arange(cache.prompt_slots, dtype=jnp.int32)[None]
    new = lengths + jnp.arange(cache.key.shape[2] - cache.prompt_slots, dtype=jnp.int32)[None]
    seen = jnp.concatenate([in_prompt < lengths, new <= own], axis=1)
    if window is None:
        return seen
    positions = jnp.concatenate([jnp.broadcast_to(in_prompt, (len(lengths), in_prompt.size)), new], axis=1)
    return seen & (positions > own - window)


def _write(slots: Slots, new: jax.Array, first: jax.Array) -> Slots:
    """Slots with new keys or values (batch, seq, kv_heads, head_dim) from slot `first` on."""
    new = new.swapaxes(1, 2)
    write = partial(lax.dynamic_update_slice_in_dim, start_index=first, axis=2)
    if not isinstance(slots, Fp8Array):
        return write(slots, new.astype(slots.dtype))
    scale = scale_from_amax(jnp.max(jnp.abs(new.astype(jnp.float32)), axis=-1, keepdims=True), slots.dtype)
    values = quantize_reference(new, slots.dtype, scale)
    return Fp8Array(write(slots.values, values), write(slots.scale, scale))


def _read(slots: Slots, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """The values of slots in `dtype`, in which every FP8 value is exact; and in FP8 their scales
    (batch, kv_heads, 1, slots).
    """
    if not isinstance(slots, Fp8Array):
        return slots, None
    return slots.values.astype(dtype), slots.scale.swapaxes(-1, -2)


def _attend(
    query: jax.Array,
    cache: KeyValueCache,
    step: jax.Array,
    window: int | None,
    scale: float | None,
    logit_cap: float | None,
) -> jax.Array:
    """One query of each row and head, (batch, 1, heads, head_dim), to the cache; softmax in float32."""
    batch, _, heads, head_dim = query.shape
    kv_heads = cache.key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    into_float32 = {"preferred_element_type": jnp.float32}
    key, key_scale = _read(cache.key, query.dtype)
    value, value_scale = _read(cache.value, query.dtype)
    logits = jnp.einsum("bkgd,bksd->bkgs", grouped, key, **into_float32)
    logits = logits if key_scale is None else logits * key_scale
    logits = logits / jnp.float32(head_dim**0.5) if scale is None else logits * jnp.float32(scale)
    logits = capped(logits, logit_cap)
    seen = _seen(cache, step, window)
    logits = jnp.where(seen[:, None, None, :], logits, -jnp.inf)  # at least its own
    weights = jax.nn.softmax(logits, axis=-1)
    weights = weights if value_scale is None else weights * value_scale
    attended = jnp.einsum("bkgs,bksd->bkgd", weights.astype(query.dtype), value, **into_float32)
    return attended.astype(query.dtype).reshape(query.shape)
