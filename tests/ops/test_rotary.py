"""Rotary positions against rotations of complex numbers, and their scaling as Llama 3.1 writes the formula."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.ops.rotary import rotate

SCALING = fp8.RotaryScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=256)


def frequencies(half, base, scaling):
    """By wavelengths, in float64."""
    found = base ** (-np.arange(half) / half)
    if scaling is None:
        return found
    longest = scaling.original_length / scaling.low_frequency_factor
    shortest = scaling.original_length / scaling.high_frequency_factor
    for i, frequency in enumerate(found):
        wavelength = 2 * math.pi / frequency
        if wavelength > longest:
            found[i] = frequency / scaling.factor
        elif wavelength > shortest:
            between = scaling.high_frequency_factor - scaling.low_frequency_factor
            smooth = (scaling.original_length / wavelength - scaling.low_frequency_factor) / between
            found[i] = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    return found


def turned(x, base, scaling):
    """(seq, features): each pair is a complex number."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * frequencies(half, base, scaling)
    pairs = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize("scaling", [None, SCALING], ids=["plain", "scaled"])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_against_complex_numbers(base, scaling):
    x = np.asarray(jax.random.normal(jax.random.key(0), (1, 300, 1, 32)), np.float64)
    found = rotate(jnp.float32(x), base=base, scaling=scaling)[0, :, 0]
    np.testing.assert_allclose(found, turned(x[0, :, 0], base, scaling), atol=2e-4)
    for other in ((base * 2, scaling), (base, SCALING if scaling is None else None)):  # negative controls
        assert np.abs(found - turned(x[0, :, 0], *other)).max() > 0.1


def test_some_pairs_of_each_kind():
    """That the test above is of all three branches."""
    turns = SCALING.original_length * frequencies(16, 10_000.0, None) / (2 * math.pi)
    assert min((turns < 1).sum(), (turns > 4).sum(), ((turns > 1) & (turns < 4)).sum()) >= 1


def test_a_factor_of_one_changes_nothing():
    x = jax.random.normal(jax.random.key(0), (1, 64, 1, 32))
    plain = fp8.RotaryScaling(factor=1.0, original_length=16)
    np.testing.assert_allclose(rotate(x, scaling=plain), rotate(x), atol=1e-5)


def test_the_defaults_are_the_rotation_that_models_were_trained_with():
    x = jax.random.normal(jax.random.key(0), (2, 6, 1, 8), jnp.bfloat16)
    assert_same_bits(rotate(x), rotate(x, base=10_000.0, scaling=None))


def test_scores_are_relative():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 32))
    repeated = [jnp.broadcast_to(a, (1, 12, 1, 32)) for a in (query, key)]
    rotated = [rotate(a)[0, :, 0] for a in repeated]
    scores = np.asarray(rotated[0] @ rotated[1].T)
    for distance in (0, 3, 7):
        diagonal = np.diagonal(scores, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)
    assert np.ptp(scores[:, 0]) > 0.1  # and they do depend on the distance


def test_given_positions():
    x = jax.random.normal(jax.random.key(0), (2, 6, 1, 8))
    picked = jnp.int32([[0, 3], [5, 2]])
    for scaling in (None, SCALING):
        found = rotate(jnp.take_along_axis(x, picked[..., None, None], axis=1), picked, scaling=scaling)
        expected = jnp.take_along_axis(rotate(x, scaling=scaling), picked[..., None, None], axis=1)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"factor": 0.5}, "factor of a RotaryScaling must be a finite number of at least 1, got 0.5"),
        ({"factor": "8"}, "factor of a RotaryScaling must be a finite number of at least 1, got '8'"),
        (
            {"original_length": 8192.0},
            "original_length of a RotaryScaling must be an integer .*, got 8192.0; pass 8192",
        ),
        ({"low_frequency_factor": 0.0}, "low_frequency_factor must be a finite number above 0, got 0.0"),
        ({"high_frequency_factor": 1.0}, "high_frequency_factor must be a finite number above the low one, 1.0, got"),
    ],
)
def test_what_is_refused(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        fp8.RotaryScaling(**{"factor": 8.0} | fields)
