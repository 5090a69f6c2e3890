"""Scales are exact: true division, in jit and out of it, to the last bit.

Amaxes below 2**-126 are left out: they are subnormal, which XLA's CPU compiler flushes to zero in some programs and not
in others.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3, E5M2, INPUT, OUTPUT_GRADIENT
from jax_fp8.core.recipe import CurrentScaling, DelayedScaling
from jax_fp8.core.scale import ScaleFormula, scale_from_amax

EDGES = np.float32([0, np.inf, np.nan, 2.0**-126, 448 * 2.0**-126, 1, 448, 57344, 3.4e38])
JIT = [pytest.param(lambda fn: fn, id="eager"), pytest.param(jax.jit, id="jit")]


def amaxes(count=100_000) -> np.ndarray:
    """Log-uniform over the normal range of float32, and the edges."""
    exponents = np.random.default_rng(0).uniform(-126, 127.9, count)
    return np.concatenate([np.exp2(exponents).astype(np.float32), EDGES])


oracle = reference.scale_from_amax


@pytest.mark.parametrize("transform", JIT)
@pytest.mark.parametrize(("dtype", "margin"), [(E4M3, 0), (E5M2, 0), (E4M3, -3)])
def test_scale_is_true_division(transform, dtype, margin):
    amax = amaxes()
    scale = transform(lambda amax: scale_from_amax(amax, dtype, margin))(jnp.asarray(amax))
    assert_same_bits(scale, oracle(amax, dtype, margin))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_reciprocal_would_be_noticed(dtype):
    """Negative control: what XLA makes of a division by a constant is off in the last bit, for many amaxes."""
    amax = amaxes(1000)
    reciprocal = np.float32(1) / reference.FP8_MAX[np.dtype(dtype)]
    multiplied = np.where(
        np.isfinite(amax) & (amax > 0), np.maximum(amax * reciprocal, reference.SMALLEST_SCALE), np.float32(1)
    )
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(multiplied, oracle(amax, dtype))


@pytest.mark.parametrize("margin", [1, 4])
def test_margin_is_headroom_in_powers_of_two(margin):
    amax = np.float32([1e-30, 0.7, 3e20])
    scale = scale_from_amax(jnp.asarray(amax), E4M3, margin)
    assert_same_bits(scale, oracle(amax, E4M3, margin))
    assert_same_bits(scale, oracle(amax, E4M3) * np.float32(2**margin))


@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan])
def test_an_amax_that_says_nothing_gives_scale_1(amax):
    assert scale_from_amax(jnp.float32(amax), E4M3) == 1
    assert scale_from_amax(jnp.float32(1), E4M3) != 1


def test_the_reciprocal_of_the_smallest_scale_is_finite():
    scale = np.asarray(scale_from_amax(jnp.float32(2.0**-126), E5M2))
    assert scale == np.float32(2.0**-126)
    assert np.isfinite(np.float32(1) / scale)


SETTINGS = {
    "plain": {},
    "epsilon": {"amax_epsilon": 1e-3},
    "power_2": {"power_2_scale": True},
    "power_2_epsilon": {"power_2_scale": True, "amax_epsilon": 0.7},
}


@pytest.mark.parametrize("transform", JIT)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_formula(transform, settings):
    amax, formula = amaxes(2000), ScaleFormula(**settings)
    scale = transform(lambda amax: formula(amax, E4M3))(jnp.asarray(amax))
    assert_same_bits(scale, np.array([reference.current_scale(value, E4M3, **settings) for value in amax], np.float32))


@pytest.mark.parametrize("transform", JIT)
@pytest.mark.parametrize("margin", [0, 3, -2, 120])
def test_a_formula_with_a_margin(transform, margin):
    amax, formula = amaxes(2000), ScaleFormula(margin=margin)
    scale = transform(lambda amax: formula(amax, E5M2))(jnp.asarray(amax))
    assert_same_bits(scale, oracle(amax, E5M2, margin))


def test_a_formula_is_a_value():
    assert ScaleFormula(margin=2) == ScaleFormula(margin=2) and hash(ScaleFormula()) == hash(ScaleFormula())
    different = [ScaleFormula(), *(ScaleFormula(**settings) for settings in (*SETTINGS.values(), {"margin": 2}))]
    assert len(set(different)) == len(SETTINGS) + 1


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_current_scaling_has_its_settings(settings):
    cast = CurrentScaling(**settings).cast(OUTPUT_GRADIENT, None, lambda: jnp.float32(0.6))
    assert_same_bits(cast.rule.scale(cast.source), reference.current_scale(0.6, E5M2, **settings))


def test_power_2_scale_rounds_the_multiplier_down():
    amax = jnp.asarray(amaxes(2000))
    exact = np.asarray(ScaleFormula()(amax, E4M3))
    power = np.asarray(ScaleFormula(power_2_scale=True)(amax, E4M3))
    assert set(np.frexp(power)[0]) == {0.5}  # nothing but a power of two
    assert ((power >= exact) & (power < 2 * exact)).all()
    assert set(np.frexp(exact)[0]) != {0.5}


def test_a_power_of_two_stays_what_it_is():
    amax = jnp.float32(448 * 2.0**5)
    assert ScaleFormula(power_2_scale=True)(amax, E4M3) == 2.0**5


def test_a_delayed_recipe_warms_up_with_its_own_margin():
    casts = [DelayedScaling(margin=margin).cast(INPUT, None, lambda: jnp.float32(0.7)) for margin in (0, 2)]
    without, scale = (cast.rule.scale(cast.source) for cast in casts)
    assert_same_bits(scale, oracle([0.7], E4M3, margin=2)[0])
    assert without != scale


def test_no_margin_overflows():
    scale = scale_from_amax(jnp.float32(3e38), E4M3, margin=20)
    assert scale == 2.0**126
    assert_same_bits(scale, oracle([3e38], E4M3, margin=20)[0])


def test_another_dtype_is_refused():
    with pytest.raises(ValueError, match=r"dtype must be E4M3 or E5M2, got .*bfloat16"):
        scale_from_amax(jnp.float32(1), jnp.bfloat16)
