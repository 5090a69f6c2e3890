"""Scaled frequencies against the published formulas in NumPy, and the fields that are refused. tests/ops/test_rotary.py
has the scaling of Llama 3.1.
"""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.ops.rotary import rotate
from jax_fp8.ops.rotary_scaling import scaling_from

BASE, FEATURES = 10_000.0, 32
PLAIN = BASE ** (-np.arange(0, FEATURES, 2) / FEATURES)
YARN = fp8.YarnScaling(factor=4.0, original_length=256)
LONG = fp8.LongRopeScaling(
    short_factors=(1.0,) * 8 + (2.0,) * 8, long_factors=(3.0,) * 16, original_length=64, attention_factor=1.5
)
ALL = [fp8.RotaryScaling(factor=8.0), fp8.LinearScaling(factor=2.0), YARN, LONG]
ALL.append(fp8.DynamicScaling(factor=2.0, original_length=64))


def test_linear():
    np.testing.assert_allclose(fp8.LinearScaling(factor=3.0).frequencies(BASE, FEATURES, 8), PLAIN / 3, rtol=1e-5)


def test_dynamic_changes_the_base_of_long_sequences_alone():
    scaling = fp8.DynamicScaling(factor=2.0, original_length=64)
    for length in (1, 64):
        np.testing.assert_allclose(scaling.frequencies(BASE, FEATURES, length), PLAIN, rtol=1e-5)
    base = BASE * (2 * 96 / 64 - 1) ** (FEATURES / (FEATURES - 2))
    expected = base ** (-np.arange(0, FEATURES, 2) / FEATURES)
    found = [scaling.frequencies(BASE, FEATURES, length) for length in (96, jnp.int32(96))]
    np.testing.assert_allclose(found, [expected] * 2, rtol=1e-5)
    assert np.abs(expected - PLAIN).max() > 1e-2


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_by_the_turns_of_each_pair(truncate):
    """The pair that makes `beta` turns in `original_length` tokens has length * frequency = 2 pi beta."""
    scaling = dataclasses.replace(YARN, truncate=truncate)
    first, last = (FEATURES / 2 * math.log(256 / (2 * math.pi * beta), BASE) for beta in (32, 1))
    first, last = (math.floor(first), math.ceil(last)) if truncate else (first, last)
    part = np.clip((np.arange(FEATURES // 2) - first) / (last - first), 0, 1)
    found = scaling.frequencies(BASE, FEATURES, 8)
    np.testing.assert_allclose(found, PLAIN * (1 - part + part / 4), rtol=1e-5)
    assert (part == 0).any() and (part == 1).any() and ((part > 0) & (part < 1)).any()
    assert scaling.amplitude == pytest.approx(0.1 * math.log(4) + 1)
    assert dataclasses.replace(YARN, attention_factor=0.5).amplitude == 0.5


def test_longrope_by_the_length():
    for length, divisors in ((64, LONG.short_factors), (65, LONG.long_factors), (jnp.int32(65), LONG.long_factors)):
        found = LONG.frequencies(BASE, FEATURES, length)
        np.testing.assert_allclose(found, PLAIN / np.array(divisors), rtol=1e-5)
    with pytest.raises(ValueError, match="must have a factor for each of 8 pairs of rotated features, got 16"):
        LONG.frequencies(BASE, 16, 8)


def test_the_length_is_that_of_the_largest_position():
    """A token at position 80 of a text is rotated alike in the whole text, and alone, as `generate` reads it."""
    x = jax.random.normal(jax.random.key(0), (1, 81, 1, FEATURES))
    for scaling in ALL:
        whole = rotate(x, scaling=scaling)[:, 80:]
        alone = jax.jit(lambda x, scaling=scaling: rotate(x, jnp.int32([[80]]), scaling=scaling))(x[:, 80:])
        np.testing.assert_allclose(alone, whole, atol=2e-5)


def test_a_part_of_the_features_and_the_amplitude():
    x = jax.random.normal(jax.random.key(0), (1, 20, 2, 40))
    found = rotate(x, scaling=LONG, fraction=0.8)
    first = rotate(x[..., :32], scaling=dataclasses.replace(LONG, attention_factor=1.0)) * 1.5
    np.testing.assert_allclose(found[..., :32], first, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[..., 32:], x[..., 32:])


@pytest.mark.parametrize("scaling", ALL, ids=lambda scaling: type(scaling).__name__)
def test_a_scaling_comes_back_from_json(scaling):
    assert scaling_from(json.loads(json.dumps(dataclasses.asdict(scaling)))) == scaling
    assert len({type(other) for other in ALL}) == 5


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fp8.LinearScaling(factor=0), "factor of a LinearScaling must be a finite number above 0, got 0"),
        (lambda: fp8.LinearScaling(factor=2.0, kind="yarn"), "kind of a LinearScaling must be 'linear', got 'yarn'"),
        (lambda: fp8.DynamicScaling(factor=0.5, original_length=8), "factor of a DynamicScaling must be .* at least 1"),
        (lambda: fp8.YarnScaling(factor=2.0, original_length=0), "original_length of a YarnScaling must be an integer"),
        (lambda: fp8.YarnScaling(factor=2.0, original_length=8, truncate=1), "truncate of a YarnScaling must be True"),
        (
            lambda: dataclasses.replace(YARN, beta_slow=40.0),
            "beta_fast of a YarnScaling must be .* above beta_slow, 40",
        ),
        (lambda: dataclasses.replace(LONG, short_factors=()), "short_factors of a LongRopeScaling must be a tuple of"),
        (lambda: dataclasses.replace(LONG, short_factors=(1.0,)), "must be equally many, got 1 and 16"),
        (
            lambda: dataclasses.replace(LONG, long_factors=(0.0,) * 16),
            "long_factors of a LongRopeScaling must be .* above 0",
        ),
        (lambda: scaling_from({"kind": "ntk"}), "the kind of a rotary_scaling must be one of linear, .*, got 'ntk'"),
    ],
)
def test_fields_that_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
