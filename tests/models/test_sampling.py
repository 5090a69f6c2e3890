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
