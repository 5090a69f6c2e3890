"""Attention token by token, with a cache, is attention to the whole sequence."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8.ops.attention import attention
from jax_fp8.ops.cached_attention import KeyValueCache, cached_attention, positions_of

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
