"""Tokens are drawn as often as NumPy says, and never where they may not be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8.models.sampling import choose_tokens

pytestmark = pytest.mark.versions

LOGITS = np.float32([0.1, 2.0, 1.2, -1.0, 0.9, 2.1, -3.0, 0.4])
DRAWS = 20_000


def probabilities(temperature, top_k, top_p):
    """Of each token: the most likely ones, one at a time, until one of the limits is reached."""
    weights = np.exp(np.float64(LOGITS) / temperature)
    order = np.argsort(-weights)[:top_k]
    kept, total = [], weights[order].sum()
    for token in order:
        if top_p is None or weights[kept].sum() / total < top_p:
            kept.append(token)
    result = np.zeros(len(LOGITS))
    result[kept] = weights[kept] / weights[kept].sum()
    return result


def deviation(temperature, top_k, top_p, expected):
    """Of the frequencies of many draws, in standard errors; infinite where a token is drawn that may not be."""
    keys = jax.random.split(jax.random.key(0), DRAWS)
    logits = jnp.broadcast_to(LOGITS, (DRAWS, len(LOGITS)))
    options = jnp.float32(temperature), top_k, None if top_p is None else jnp.float32(top_p)
    counts = np.bincount(choose_tokens(logits, keys, *options), minlength=len(LOGITS))
    if counts[expected == 0].any():
        return np.inf
    mean, drawn = DRAWS * expected, expected > 0
    return np.max(np.abs(counts - mean)[drawn] / np.sqrt(mean * (1 - expected) + 1)[drawn])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "support"),
    [(0.7, None, None, 8), (1.3, 3, None, 3), (0.7, None, 0.7, 2), (0.7, 4, 0.9, 3), (1.0, 99, 1e-6, 1)],
)
def test_frequencies(temperature, top_k, top_p, support):
    expected = probabilities(temperature, top_k, top_p)
    assert np.count_nonzero(expected) == support
    assert deviation(temperature, top_k, top_p, expected) < 4.5
    if support > 1:  # negative controls: another temperature, and one token less
        assert deviation(temperature * 1.2, top_k, top_p, expected) > 4.5
        fewer = np.where(expected == np.min(expected[expected > 0]), 0, expected)
        assert deviation(temperature, top_k, top_p, fewer / fewer.sum()) == np.inf


def test_of_equal_tokens_no_more_than_top_k_are_drawn():
    keys = jax.random.split(jax.random.key(0), 200)
    drawn = choose_tokens(jnp.zeros((200, 8)), keys, jnp.float32(1), 3, None)
    assert set(np.asarray(drawn)) == {0, 1, 2}


def test_the_most_likely_token():
    chosen = choose_tokens(jnp.stack([LOGITS, -LOGITS]), None, jnp.float32(0), None, None)
    assert chosen.dtype == jnp.int32 and chosen.tolist() == [5, 6]


@pytest.mark.parametrize("options", [(None, None), (5, None), (None, 0.9), (4, 1e-45)], ids=str)
@pytest.mark.parametrize("temperature", [1e-7, 1e-20, 1e-36, 1.2e-38, 1e-38, 1e-42, 1e-45, 0.0])
def test_the_smallest_temperatures_draw_the_most_likely_token(temperature, options):
    """Numbers below 1.2e-38 are zero to the compiler, and logits over small numbers are infinite."""
    logits = jnp.stack([LOGITS, -LOGITS, 1e4 * LOGITS, LOGITS - 50])
    top_k, top_p = options[0], None if options[1] is None else jnp.float32(options[1])
    choose = jax.jit(choose_tokens, static_argnums=3)
    for seed in range(4):
        keys = jax.random.split(jax.random.key(seed), 4)
        assert choose(logits, keys, np.float32(temperature), top_k, top_p).tolist() == [5, 6, 5, 5]
    warm = [choose(logits, jax.random.split(jax.random.key(seed), 4), 2.0, None, None).tolist() for seed in range(4)]
    assert any(found[0] != 5 for found in warm)  # negative control


def test_the_smallest_temperatures_draw_any_of_the_most_likely_tokens():
    keys = jax.random.split(jax.random.key(0), 200)
    logits = jnp.broadcast_to(jnp.float32([0, 3, 1, 3]), (200, 4))
    assert set(np.asarray(choose_tokens(logits, keys, jnp.float32(1e-40), None, None))) == {1, 3}


def test_the_largest_temperatures_draw_anything():
    keys = jax.random.split(jax.random.key(0), 400)
    logits = jnp.broadcast_to(LOGITS, (400, 8))
    assert set(np.asarray(choose_tokens(logits, keys, jnp.float32(3e38), None, None))) == set(range(8))
