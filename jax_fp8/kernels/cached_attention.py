"""Attention of one new token of each row to a cache of keys and values, as one kernel.

    query, key ─rotate─ round to dtype        key, value ─round to the cache's dtype→ slot prompt_slots + step
    logits = scale Σ query key        weights = softmax(logits of the slots that are seen)        Σ weights value

While text is generated, one token of each row comes at a time, and most of its attention is a read of the cache. XLA
needs a kernel for the rotation, one for each write, and some for two products with a vector and the softmax. This one
reads each key and value once, by all multiprocessors, and writes the new row in place.

    slot    0 ... length - 1        ... prompt_slots - 1    prompt_slots + i
    has     the prompt of a row     anything                the new token i of every row

All arithmetic is in float32, and the result rounds once to `dtype`. Nothing in a slot that is not seen has an
influence, not even a NaN. Keys and values may be E4M3 with one scale for each, `x ≈ values * scale`, from its amax. A
slot is written first and then read, so the new token sees its own key as rounded as later tokens will.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_fp8.core.formats import E4M3
from jax_fp8.core.scale import scale_from_amax
from jax_fp8.kernels.casting import quantize_reference
from jax_fp8.kernels.dispatch import Split, dispatch, gathered
from jax_fp8.kernels.explicit import divides, explicit_mesh, explicit_spec, place

TARGET = "jax_fp8_cached_attention"
SOURCES = (jnp.float32, jnp.bfloat16, jnp.float16)
HEAD_DIMS = range(16, 257, 8)  # as in csrc/cached_attention.h
MOST_QUERIES = 16  # that share a key head

# Of queries (batch, key heads, queries of each, features), of the new key and value, of both caches, lengths and step.
# Batch and key heads may be split. Dims that a result has alone are whole on every device.
OPERANDS = ("b k g d", "b k d", "b k d", "b k s d", "b k s d", "b", "")
ROTARY = ("b r", "b r")
SCALES = ("b k s", "b k s")
RESULTS = ("b k h e", "b k t e", "b k t e")
NEW_SCALES = ("b k t", "b k t")


class Attended(NamedTuple):
    """What `attend_to_cache` returns: the attention like the query, and the caches with the new row."""

    attended: jax.Array
    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None


@dataclass(frozen=True)
class How:
    """The static part of a call: as for `attend_to_cache`, and which optional operands there are."""

    prompt_slots: int
    scale: float
    window: int | None
    logit_cap: float | None
    has_rotary: bool
    has_scales: bool


def attend_to_cache(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    step: jax.Array,
    *,
    prompt_slots: int,
    scale: float,
    window: int | None = None,
    logit_cap: float | None = None,
    rotary: tuple[jax.Array, jax.Array] | None = None,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
) -> Attended:
    """Write the key and the value of a new token into the cache, and attend to the cache.

    Args:
      query: (batch, heads, head_dim) of the new token, in float32, bfloat16 or float16.
      key, value: (batch, kv_heads, head_dim) in the dtype of `query`.
      keys, values: the cache (batch, kv_heads, slots, head_dim), in the dtype of `query` or in E4M3. Donated, it is
        written in place.
      lengths: i32[batch], of the prompts, from 0 to `prompt_slots`; other lengths count as the nearer end.
      step: i32[], the number of the new token, from 0 to `slots - prompt_slots - 1`; likewise.
      prompt_slots: slots of the prompts with their padding.
      scale: of the products of queries and keys.
      window: how many positions the token sees, its own last; None: all. New token i of a row has the position
        `length + i`.
      logit_cap: logits are `cap * tanh(logits / cap)`; None leaves them.
      rotary: cosines and sines f32 (batch, rotated / 2) of the token's position, by which the first `rotated` features
        of query and key are rotated, as ops/rotary.py rotates them; None: they are rotated already, or never.
      key_scales, value_scales: f32 (batch, kv_heads, slots) of a cache in E4M3.

    Returns:
      `attended` like `query`; `keys`, `values`, and in E4M3 `key_scales` and `value_scales`.

    Raises:
      ValueError: if an array has another shape or dtype, or a number is not valid.
    """
    _check(query, key, value, keys, values, lengths, step)
    _check_numbers(keys, prompt_slots, scale, window, logit_cap)
    _check_rotary(query, rotary)
    scales = _check_scales(keys, key_scales, value_scales)
    how = How(prompt_slots, float(scale), window, logit_cap, rotary is not None, bool(scales))
    operands = [_grouped(query, key.shape[1]), key, value, keys, values, lengths, step, *(rotary or ()), *scales]
    rule = f"{', '.join(_dims(how))} -> {', '.join((*RESULTS, *(NEW_SCALES if scales else ())))}"
    attended, *caches = dispatch(rule, partial(_kernel, how), partial(_reference, how), *operands)
    return Attended(attended.reshape(query.shape), *caches)


def is_chosen(query: jax.Array, kv_heads: int) -> bool:
    """Whether text generation attends by this kernel, with queries (batch, heads, head_dim)."""
    heads, head_dim = query.shape[1:]
    return head_dim in HEAD_DIMS and heads // kv_heads <= MOST_QUERIES and query.dtype in SOURCES


def _check(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    step: jax.Array,
) -> None:
    rows = query.ndim == key.ndim == 3 and keys.ndim == 4 and key.shape == value.shape and keys.shape == values.shape
    if not rows or (*keys.shape[:2], keys.shape[3]) != key.shape or (key.shape[0], key.shape[2]) != query.shape[::2]:
        raise ValueError(
            "attend_to_cache needs a query (batch, heads, head_dim), key and value (batch, kv_heads, head_dim), keys "
            f"and values (batch, kv_heads, slots, head_dim), got {query.shape}, {key.shape} and {value.shape}, "
            f"{keys.shape} and {values.shape}; reshape them"
        )
    heads, kv_heads, head_dim = query.shape[1], *key.shape[1:]
    if head_dim not in HEAD_DIMS or kv_heads == 0 or heads % kv_heads or not 1 <= heads // kv_heads <= MOST_QUERIES:
        raise ValueError(
            "attend_to_cache needs a head_dim that is a multiple of 8 from 16 to 256, and 1 to 16 queries for each key "
            f"head, got {head_dim=}, {heads=} and {kv_heads=}; use another attention"
        )
    if query.dtype not in SOURCES or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "attend_to_cache needs query, key and value of one dtype, float32, bfloat16 or float16, "
            f"got {query.dtype}, {key.dtype} and {value.dtype}; cast first"
        )
    if keys.dtype != values.dtype or keys.dtype not in (query.dtype, E4M3):
        raise ValueError(
            f"attend_to_cache needs keys and values in {query.dtype}, the dtype of the query, or in float8_e4m3fn, "
            f"got {keys.dtype} and {values.dtype}; make the cache in one of them"
        )
    if lengths.shape != keys.shape[:1] or step.shape != () or not lengths.dtype == step.dtype == jnp.int32:
        raise ValueError(
            "attend_to_cache needs lengths i32[batch] and a step i32[], "
            f"got {lengths.dtype}{list(lengths.shape)} and {step.dtype}{list(step.shape)}; cast or reshape them"
        )


def _check_numbers(
    keys: jax.Array, prompt_slots: int, scale: float, window: int | None, logit_cap: float | None
) -> None:
    slots = keys.shape[2]
    if not 0 <= prompt_slots < slots:
        raise ValueError(
            "attend_to_cache needs prompt_slots of 0 or more, and a slot behind them, "
            f"got {prompt_slots=} of {slots} slots; make the cache larger"
        )
    if not np.isfinite(scale):
        raise ValueError(f"attend_to_cache needs a finite scale, got {scale}; pass head_dim ** -0.5")
    if window is not None and window < 1:
        raise ValueError(f"attend_to_cache needs a window of at least 1, got {window}; pass None for none")
    if logit_cap is not None and not (np.isfinite(logit_cap) and logit_cap > 0):
        raise ValueError(f"attend_to_cache needs a finite logit_cap above 0, got {logit_cap}; pass None for none")


def _check_rotary(query: jax.Array, rotary: tuple[jax.Array, jax.Array] | None) -> None:
    if rotary is None:
        return
    batch, _, head_dim = query.shape
    for array in rotary:
        fits = array.ndim == 2 and array.shape[0] == batch and 2 * array.shape[1] <= head_dim
        if not fits or array.dtype != jnp.float32 or array.shape != rotary[0].shape:
            raise ValueError(
                f"attend_to_cache needs cosines and sines f32 ({batch}, rotated / 2) with at most {head_dim} rotated "
                f"features, got {', '.join(f'{of.dtype}{list(of.shape)}' for of in rotary)}; pass those of one position"
            )


def _check_scales(keys: jax.Array, key_scales: jax.Array | None, value_scales: jax.Array | None) -> list[jax.Array]:
    scales = [array for array in (key_scales, value_scales) if array is not None]
    if len(scales) != (2 if keys.dtype == E4M3 else 0):
        raise ValueError(
            "attend_to_cache needs key_scales and value_scales for a cache in float8_e4m3fn, and for no other, "
            f"got {len(scales)} of them and {keys.dtype}; pass both or neither"
        )
    for array in scales:
        if array.shape != keys.shape[:3] or array.dtype != jnp.float32:
            raise ValueError(
                f"attend_to_cache needs scales f32{list(keys.shape[:3])}, one for each slot of a head, "
                f"got {array.dtype}{list(array.shape)}; cast or reshape them"
            )
    return scales


def _dims(how: How) -> tuple[str, ...]:
    """Of the operands that there are."""
    return (*OPERANDS, *(ROTARY if how.has_rotary else ()), *(SCALES if how.has_scales else ()))


def _grouped(query: jax.Array, kv_heads: int) -> jax.Array:
    """(batch, heads, features) as (batch, key heads, queries of each, features)."""
    mesh, spec = explicit_mesh(query), explicit_spec(query)
    if mesh is not None and not divides(mesh, spec[1], kv_heads):
        query = place(mesh, query, PartitionSpec(spec[0], None, spec[2]))
    batch, heads, features = query.shape
    return query.reshape(batch, kv_heads, heads // kv_heads, features)


def _whole(how: How, split: Split, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Operands that are split by batch and key heads at most."""
    return [
        gathered(array, split, *("" if dim in "bk" else dim for dim in dims.split()))
        for dims, array in zip(_dims(how), operands, strict=True)
    ]


def _optional(how: How, others: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    """Rotary and scales, from the operands behind those that every call has."""
    rotary = others[: 2 * how.has_rotary]
    return rotary, others[len(rotary) :]


def _kernel(how: How, *operands: jax.Array, split: Split):
    query, key, value, keys, values, lengths, step, *others = _whole(how, split, operands)
    absent = (jnp.zeros((0, 0), jnp.float32),) * 2
    rotary, scales = _optional(how, others)
    arguments = (query, key, value, keys, values, lengths, step, *(rotary or absent), *(scales or absent), absent[0])
    updated = (3, 4, 9, 10)  # keys, values and their scales
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (query, *(arguments[i] for i in updated))]
    aliases = {operand: number for number, operand in enumerate(updated, 1) if arguments[operand].size}
    found = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)(
        *arguments,
        prompt_slots=np.int32(how.prompt_slots),
        scale=np.float32(how.scale),
        window=np.int32(min(how.window or 0, np.iinfo(np.int32).max)),
        logit_cap=np.float32(how.logit_cap or 0),
        attended_row=np.int32(0),  # of the last operand, a scale by which the result is cast
    )
    return tuple(found if how.has_scales else found[:3])


def _reference(how: How, *operands: jax.Array, split: Split):
    query, key, value, keys, values, lengths, step, *others = _whole(how, split, operands)
    rotary, scales = _optional(how, others)
    if rotary:
        # Without a barrier, XLA may leave out the rounding to `dtype`.
        query, key = lax.optimization_barrier((_rotated(query, *rotary), _rotated(key, *rotary)))
    slots = keys.shape[2]
    lengths = jnp.clip(lengths, 0, how.prompt_slots)
    step = jnp.clip(step, 0, slots - how.prompt_slots - 1)
    own = how.prompt_slots + step
    keys, *key_scales = _written(keys, key, own, *scales[:1])
    values, *value_scales = _written(values, value, own, *scales[1:])
    seen = _seen(how, slots, lengths, step)
    key_rows, value_rows = _rows(seen, keys, *key_scales), _rows(seen, values, *value_scales)
    precise = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    logits = jnp.einsum("bkgd,bksd->bkgs", query.astype(jnp.float32), key_rows, **precise) * np.float32(how.scale)
    if how.logit_cap is not None:
        logits = np.float32(how.logit_cap) * jnp.tanh(logits / np.float32(how.logit_cap))
    weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], logits, -jnp.inf), axis=-1)
    attended = jnp.einsum("bkgs,bksd->bkgd", weights, value_rows, **precise)
    return attended.astype(query.dtype), keys, values, *key_scales, *value_scales


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """`x` (batch, ..., features) with its first features rotated by the angles of (batch, rotated / 2)."""
    half = cos.shape[-1]
    cos, sin = (wave.reshape(len(wave), *(1,) * (x.ndim - 2), half) for wave in (cos, sin))
    first, second = (x[..., part].astype(jnp.float32) for part in (slice(half), slice(half, 2 * half)))
    parts = [_rounded(first * cos) - _rounded(second * sin), _rounded(second * cos) + _rounded(first * sin)]
    return jnp.concatenate([*(part.astype(x.dtype) for part in parts), x[..., 2 * half :]], axis=-1)


def _rounded(product: jax.Array) -> jax.Array:
    """A product rounded to float32, as the kernel rounds it. A compiler may fuse a product and the following sum into
    one rounding; the selection prevents that.
    """
    return jnp.where(product == product, product, np.float32(np.nan))


def _written(slots: jax.Array, new: jax.Array, own: jax.Array, *scales: jax.Array) -> list[jax.Array]:
    """Slots of keys or values, and in E4M3 their scales, with a new row (batch, kv_heads, head_dim)."""
    write = partial(lax.dynamic_update_slice_in_dim, start_index=own, axis=2)
    if not scales:
        return [write(slots, new[:, :, None])]
    scale = scale_from_amax(_amaxes(new), E4M3)[..., None]
    return [write(slots, quantize_reference(new, E4M3, scale)[:, :, None]), write(scales[0], scale)]


def _amaxes(x: jax.Array) -> jax.Array:
    """Of each row, as `amax_reference`, which takes an array: NaN orders above all numbers."""
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.uint32)
    return lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)


def _seen(how: How, slots: int, lengths: jax.Array, step: jax.Array) -> jax.Array:
    """Which slots the new token of each row sees, bool[batch, slots]."""
    slot, lengths = jnp.arange(slots, dtype=jnp.int32)[None], lengths[:, None]
    in_prompt, number = slot < how.prompt_slots, slot - how.prompt_slots
    seen = jnp.where(in_prompt, slot < lengths, number <= step)
    if how.window is None:
        return seen
    return seen & (jnp.where(in_prompt, slot, lengths + number) > lengths + step - how.window)


def _rows(seen: jax.Array, slots: jax.Array, *scales: jax.Array) -> jax.Array:
    """Keys or values in float32; zeros in slots that are not seen, where anything may stand."""
    rows = slots.astype(jnp.float32)
    rows = rows * scales[0][..., None] if scales else rows
    return jnp.where(seen[:, None, :, None], rows, 0)
