"""Attention token by token, with a cache, is attention to the whole sequence."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.ops.attention import attention
from jax_fp8.ops.cached_attention import KeyValueCache, cached_attention, empty_slots, positions_of

pytestmark = pytest.mark.versions

PROMPT_SLOTS, NEW, HEADS, KV_HEADS, HEAD_DIM = 6, 4, 4, 2, 8
LENGTHS = jnp.int32([3, 6])


def heads(seed, count):
    return jax.random.normal(jax.random.key(seed), (2, PROMPT_SLOTS + NEW, count, HEAD_DIM))


QUERY, KEY, VALUE = (heads(seed, count) for seed, count in enumerate((HEADS, KV_HEADS, KV_HEADS)))


@partial(jax.jit, static_argnums=1)
def read_prompts(cache, window):
    """The first tokens of each row, and behind them padding: its first token again."""
    padding = jnp.arange(PROMPT_SLOTS)[None, :, None, None] >= LENGTHS[:, None, None, None]
    parts = [jnp.where(padding, x[:, :1], x[:, :PROMPT_SLOTS]) for x in (QUERY, KEY, VALUE)]
    return cached_attention(*parts, cache, implementation="xla", window=window)


@partial(jax.jit, static_argnums=2)
def read_token(cache, step, window):
    parts = [jnp.take_along_axis(x, (LENGTHS + step)[:, None, None, None], axis=1) for x in (QUERY, KEY, VALUE)]
    return cached_attention(*parts, replace(cache, step=step), implementation="xla", window=window)


def written(window, moved=0):
    """What each row reads, put together, with the new tokens `moved` by so many slots."""
    empty = jnp.zeros((2, KV_HEADS, PROMPT_SLOTS + NEW, HEAD_DIM))
    attended, cache = read_prompts(KeyValueCache(empty, empty, LENGTHS, None, PROMPT_SLOTS), window)
    rows = [list(np.asarray(row[:length])) for row, length in zip(attended, LENGTHS, strict=True)]
    np.testing.assert_array_equal(attended[0, 3:], np.broadcast_to(attended[0, 0], (3, HEADS, HEAD_DIM)))
    for step in range(NEW):
        cache = replace(cache, step=None, key=jnp.roll(cache.key, moved, axis=2))
        attended, cache = read_token(cache, jnp.int32(step), window)
        for row, token in zip(rows, np.asarray(attended), strict=True):
            row.append(token[0])
    return rows


# Windows shorter than both prompts, than one, and longer than both.
@pytest.mark.parametrize("window", [None, 2, 3, 5, 8])
def test_token_by_token(window):
    expected = np.asarray(attention(QUERY, KEY, VALUE, causal=True, implementation="xla", window=window))
    for row, whole, length in zip(written(window), expected, (3, 6), strict=True):
        np.testing.assert_allclose(row, whole[: length + NEW], rtol=1e-5, atol=1e-6)
    for row, whole, length in zip(written(window, moved=1), expected, (3, 6), strict=True):  # negative control
        assert np.abs(row - whole[: length + NEW])[length:].max() > 0.1


def test_positions():
    assert positions_of(LENGTHS, 6, None).tolist() == [[0, 1, 2, 0, 0, 0], [0, 1, 2, 3, 4, 5]]
    assert positions_of(LENGTHS, 6, jnp.int32(2)).tolist() == [[5], [8]]


# ---- keys and values in FP8 ------------------------------------------------------------------------------------------


def attended_in_fp8(spoil=lambda cache: cache):
    """The result of the second new token over a cache in FP8, and what the slots then stand for, in float32."""
    empty = empty_slots((2, KV_HEADS, PROMPT_SLOTS + NEW, HEAD_DIM), fp8.E4M3)
    _, cache = read_prompts(KeyValueCache(empty, empty, LENGTHS, None, PROMPT_SLOTS), None)
    for step in range(2):
        attended, cache = read_token(spoil(replace(cache, step=None)), jnp.int32(step), None)
    return np.asarray(attended)[:, 0], cache.key, cache.value


def test_each_key_and_value_in_fp8_has_a_scale_of_its_own():
    attended, *slots = attended_in_fp8()
    key, value = (np.asarray(x.dequantize()) for x in slots)
    for found, whole in ((key, KEY), (value, VALUE)):
        for row, length in enumerate(LENGTHS):
            own = np.swapaxes(whole[row], 0, 1)  # (kv_heads, tokens, head_dim)
            largest = np.abs(own).max(-1, keepdims=True)
            written = np.concatenate([found[row, :, :length], found[row, :, PROMPT_SLOTS : PROMPT_SLOTS + 2]], axis=1)
            expected = own[:, : length + 2]
            assert (
                np.abs(written - expected) <= np.maximum(np.abs(expected) / 16, largest[:, : length + 2] / 448)
            ).all()
            np.testing.assert_allclose(np.abs(written).max(-1), np.abs(expected).max(-1), rtol=1e-6)
    query = np.stack([np.asarray(QUERY)[row, length + 1] for row, length in enumerate(LENGTHS)])

    def exact(key):
        results = np.zeros((2, HEADS, HEAD_DIM))
        for row, length in enumerate(LENGTHS):
            seen = [*range(length), PROMPT_SLOTS, PROMPT_SLOTS + 1]
            for head in range(HEADS):
                of = head * KV_HEADS // HEADS
                logits = key[row, of, seen].astype(np.float64) @ query[row, head] / HEAD_DIM**0.5
                weights = np.exp(logits - logits.max())
                results[row, head] = weights / weights.sum() @ value[row, of, seen].astype(np.float64)
        return results

    np.testing.assert_allclose(attended, exact(key), rtol=1e-5, atol=1e-6)
    without_scales = np.asarray(slots[0].values, np.float32)
    assert np.abs(attended - exact(without_scales)).max() > 0.1  # negative control


def test_slots_in_fp8_that_are_not_seen_do_not_count():
    unseen = jnp.arange(PROMPT_SLOTS + NEW)[None, None, :, None] >= jnp.where(
        jnp.arange(PROMPT_SLOTS + NEW) < PROMPT_SLOTS, LENGTHS[:, None], PROMPT_SLOTS + 2
    )[:, None, :, None]  # fmt: skip

    def spoil(cache):
        def with_other(slots):
            return replace(slots, values=jnp.where(unseen, jnp.asarray(3, slots.dtype), slots.values))

        return replace(cache, key=with_other(cache.key), value=with_other(cache.value))

    np.testing.assert_array_equal(attended_in_fp8(spoil)[0], attended_in_fp8()[0])
