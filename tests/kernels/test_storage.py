"""Numbers in few bits, bit for bit against NumPy, and what must hold of them: 16 bits that complete a param, and
roundings that are fair.

Left out are subnormal float32 numbers, which XLA's CPU compiler flushes to zero.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from emitters import EAGER_AND_JITTED, jit_as_for_users
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3, E5M2, fp8_max
from jax_fp8.kernels.draws import draws_of, index_of
from jax_fp8.kernels.storage import (
    REMAINDER,
    master_of,
    off_the_tie,
    quantize_at_random,
    quantize_root,
    remainder_of,
    round_at_random,
    rounds_to,
)

ULP = {E4M3: 2.0**-3, E5M2: 2.0**-2}  # relative, at most
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}
BF16 = jnp.bfloat16
NU, MU = 0, 1  # which draw


def rounded(x, dtype, scale, seed, leaf, moment=NU):
    """A moment as it is kept: nu by its root in FP8, and never zero."""
    draw = draws_of(index_of(x), seed, leaf)[moment]
    if dtype == BF16:
        return round_at_random(x, draw, never_zero=moment == NU)
    return (quantize_root, quantize_at_random)[moment](x, dtype, scale, draw)


ROUNDED = jit_as_for_users(rounded, static_argnums=(1, 4, 5))


def masters() -> np.ndarray:
    """Random bit patterns, and every bfloat16 number with a remainder around the middle."""
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    middles = (np.arange(2**16, dtype=np.uint32)[:, None] << 16) | low
    x = np.concatenate([random, middles.ravel()]).view(np.float32)
    return x[(np.abs(x) >= 2.0**-126) | (x == 0) | np.isnan(x)]


def rounded_and_remainder(master):
    with np.errstate(invalid="ignore"):
        return np.asarray(master).astype(ml_dtypes.bfloat16), np.asarray(remainder_of(master))


@EAGER_AND_JITTED
def test_a_param_and_its_remainder_are_the_master(transform):
    x = masters()
    x = x[~np.isnan(x)]
    moved = np.asarray(transform(off_the_tie)(x))
    assert_same_bits(moved, reference.off_the_tie(x))
    assert_same_bits(moved.astype(ml_dtypes.bfloat16), x.astype(ml_dtypes.bfloat16))  # the same param
    assert (moved != x).sum() > 2**15 - 300  # every second tie, save the subnormal ones
    remainder = transform(remainder_of)(moved)
    assert_same_bits(remainder, reference.remainder(moved))
    assert remainder.dtype == REMAINDER
    assert_same_bits(transform(master_of)(moved.astype(ml_dtypes.bfloat16), remainder), moved)


def test_on_the_tie_two_masters_share_param_and_remainder():
    """The negative control: what `off_the_tie` is for."""
    # Odd, rounded up to what the even one is rounded down to.
    pair = np.array([0x3F818000, 0x3F828000], np.uint32).view(np.float32)
    param, remainder = rounded_and_remainder(pair)
    assert pair[0] != pair[1]
    assert (param[0], remainder[0]) == (param[1], remainder[1])
    assert master_of(param, remainder)[0] != pair[0]
    param, remainder = rounded_and_remainder(off_the_tie(pair))
    assert param[0] == param[1]
    assert remainder[0] != remainder[1]


def test_special_masters():
    largest = np.uint32(0x7F7F8000).view(np.float32)  # beyond the largest bfloat16 number: its param is infinite
    x = np.array([np.inf, -np.inf, 0.0, -0.0, largest, -largest], np.float32)
    moved = off_the_tie(x)
    param, remainder = rounded_and_remainder(moved)
    assert np.isinf(param[4:].astype(np.float32)).all()
    assert_same_bits(master_of(param, remainder), moved)
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0x7FC18000], np.uint32).view(np.float32)
    assert np.isnan(np.asarray(off_the_tie(nan))).all()
    assert np.isnan(np.asarray(master_of(*rounded_and_remainder(off_the_tie(nan))))).all()


@pytest.mark.parametrize("moment", [NU, MU], ids=["nu", "mu"])
def test_bfloat16_is_numpys(moment):
    """Every bfloat16 number and what lies beyond it, infinities and NaNs, with several seeds."""
    x = masters()
    x = x[~np.signbit(x) | np.isnan(x)] if moment == NU else x
    for seed, leaf in [(0, 0), (1, 0), (2**32 - 1, 2**17)]:
        draw = reference.draws(x.shape, seed, leaf)[moment]
        expected = reference.round_at_random(x, draw, never_zero=moment == NU)
        assert_same_bits(ROUNDED(x, BF16, jnp.float32(1), jnp.uint32(seed), leaf, moment), expected)
    kept = expected.astype(np.float32)
    assert_same_bits(np.isinf(kept), np.isinf(x))  # what is too large is the largest number
    assert_same_bits(np.isnan(kept), np.isnan(x))
    exact = (x.view(np.uint32) % 2**16 == 0) & ~np.isnan(x)
    assert exact.sum() > 2**14
    assert_same_bits(kept[exact], x[exact])
    assert moment == MU or not (kept[x > 0] == 0).any()


def test_a_positive_second_moment_never_becomes_zero():
    """Below the smallest bfloat16 number too; a first moment may."""
    x, draw = np.uint32([0, 1, 0x10, 0x8000, 0xFFFF]).view(np.float32), jnp.zeros(5, jnp.uint32)
    for kept, zeros in ((round_at_random(x, draw, never_zero=True), 1), (round_at_random(x, draw), 5)):
        bits = np.asarray(kept).view(np.uint16)
        assert_same_bits(bits, np.arange(5, dtype=np.uint16).clip(0, 1) if zeros == 1 else np.zeros(5, np.uint16))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (33, 65), (3, 5, 7)])
def test_root_is_numpys(dtype, shape):
    root = np.exp(np.random.default_rng(0).uniform(-12, 1, shape)).astype(np.float32) * fp8_max(dtype)
    for seed, leaf, scale in [(0, 0, 1.0), (1, 0, 0.0123), (12345, 7, 3.7), (2**32 - 1, 2**17, 1e-12)]:
        v = np.square(root * np.float32(scale))
        draws = reference.draws(shape, seed, leaf)
        args = dtype, jnp.float32(scale), jnp.uint32(seed), leaf
        assert_same_bits(ROUNDED(v, *args, NU), reference.quantize_root(v, dtype, scale, draws.nu))
        m = root * np.float32(scale) * np.where(root.view(np.uint32) % 2, -1, 1).astype(np.float32)
        assert_same_bits(ROUNDED(m, *args, MU), reference.quantize_at_random(m, dtype, scale, draws.mu))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_root_is_one_of_its_two_neighbours_and_never_zero(dtype):
    smallest = SMALLEST[dtype]
    x = np.concatenate([np.geomspace(smallest * 1e-6, fp8_max(dtype), 20_000), [smallest * 0.001] * 1000])
    x = x.astype(np.float32)
    values = np.asarray(ROUNDED(np.square(x), dtype, jnp.float32(1), jnp.uint32(3), 0)).astype(np.float32)
    assert (values > 0).all()
    assert (values <= fp8_max(dtype)).all()
    normal = x >= smallest / ULP[dtype]
    assert (np.abs(values - x)[normal] < ULP[dtype] * x[normal] * (1 + 1e-6)).all()
    assert (np.abs(values - x)[~normal] < smallest * (1 + 1e-6)).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_root_of_special_numbers(dtype):
    largest = fp8_max(dtype)
    v = np.float32([0, np.inf, np.square(largest), np.square(largest * 2), np.nan])
    values = np.asarray(ROUNDED(v, dtype, jnp.float32(1), jnp.uint32(0), 0))
    assert_same_bits(values[:4], np.array([0, largest, largest, largest], dtype))
    assert values[4:].view(np.uint8) == [reference.NAN_BYTE]
    m = np.float32([0, -0.0, np.inf, -np.inf, largest, -2 * largest, np.nan])
    values = np.asarray(ROUNDED(m, dtype, jnp.float32(1), jnp.uint32(0), 0, MU))
    assert_same_bits(values[:6], np.array([0, -0.0, largest, -largest, largest, -largest], dtype))
    assert values[6:].view(np.uint8) == [reference.NAN_BYTE]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_root_of_what_fp8_holds_is_exact_for_every_seed(dtype):
    x = np.arange(0x7C if dtype == E5M2 else 0x7F, dtype=np.uint8).view(np.dtype(dtype))
    for seed in range(20):
        args = dtype, jnp.float32(1), jnp.uint32(seed), 0
        assert_same_bits(ROUNDED(np.square(x.astype(np.float32)), *args), x)
        assert_same_bits(ROUNDED(-x.astype(np.float32), *args, MU), -x)


@pytest.mark.parametrize("moment", [NU, MU], ids=["nu", "mu"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, BF16])
def test_roundings_are_right_on_average(dtype, moment):
    """Over seeds and over elements; rounding to nearest and a hash that ignores the seed are the negative controls."""
    smallest = SMALLEST.get(dtype, 1e-30)
    x = np.float32([1.031, 3.3, 17.9, 30.01, 0.2, smallest * 1.7, smallest * 40.3])
    x = -x if moment == MU else x
    takes_square = dtype != BF16 and moment == NU
    exact = np.sqrt(np.square(x)) if takes_square else x
    seeds = jnp.arange(10_000, dtype=jnp.uint32)
    given = jnp.square(x) if takes_square else x
    many = jax.jit(jax.vmap(lambda seed: rounded(given, dtype, jnp.float32(1), seed, 5, moment)))

    def deviations(samples, exact=exact):  # in standard errors
        standard_error = samples.std(axis=0) / np.sqrt(len(samples))
        return np.abs(samples.mean(axis=0) - exact) / np.maximum(standard_error, 1e-12 * np.abs(exact))

    samples = np.asarray(many(seeds)).astype(np.float64)
    assert (deviations(samples) < 4).all()
    nearest = np.broadcast_to(exact.astype(dtype).astype(np.float64), samples.shape)
    assert (deviations(nearest) > 4).all()
    assert (deviations(np.asarray(many(jnp.zeros_like(seeds))).astype(np.float64)) > 4).all()

    same = np.float32(1.031)
    elements = jnp.full((100, 100), np.square(same) if takes_square else same)
    elements = np.asarray(ROUNDED(elements, dtype, jnp.float32(1), jnp.uint32(9), 0, moment)).astype(np.float64)
    assert (deviations(elements.reshape(-1, 1), same)[0] < 4).all()
    lower, upper = np.unique(elements)
    assert lower < same < upper
    rows, columns = (elements == upper).mean(1), (elements == upper).mean(0)  # no stripes
    chance = (same - lower) / (upper - lower)
    spread = np.sqrt(chance * (1 - chance) / 100)
    assert 0.7 < min(rows.std(), columns.std()) / spread < max(rows.std(), columns.std()) / spread < 1.4


def test_rounding_is_decided_by_seed_and_leaf():
    v = np.random.default_rng(0).uniform(1, 100, (1000,)).astype(np.float32)

    def root(seed, leaf):
        return np.asarray(ROUNDED(v, E4M3, jnp.float32(1), jnp.uint32(seed), leaf)).view(np.uint8)

    assert_same_bits(root(1, 0), root(1, 0))
    different = [(root(1, 0) != root(seed, leaf)).mean() for seed, leaf in [(2, 0), (1, 1), (0, 1), (1, 2**31)]]
    assert min(different) > 0.2  # of the elements; a third, for independent roundings


def test_a_remainder_beside_another_param():
    """A param that was changed keeps its number, but for bits that round away; no zero and no infinity becomes NaN."""
    param = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    wide = param.astype(np.float32)
    for remainder in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = np.asarray(master_of(param, np.full(2**16, remainder, np.uint16)))
        assert_same_bits(np.isnan(master), np.isnan(wide))
        kept = (np.abs(wide) > 1e-37) | (wide == 0)  # a NaN is neither
        assert_same_bits(master[kept].astype(ml_dtypes.bfloat16), param[kept])
    joined = np.array([2**32 - 2**16 + 0x8001], np.uint32)  # the control: zero, and the remainder of another param
    assert np.isnan(joined.view(np.float32)).all()


@EAGER_AND_JITTED
@pytest.mark.parametrize("master_dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_masters_round_to_their_params(transform, master_dtype, dtype):
    """One number beside another is noticed; one zero beside the other, or one NaN, is none."""
    special = [0, -0.0, np.nan, np.inf, -np.inf, 1.0]
    master = np.float32([*special, 3.14159, 1e-3, -77.7, 6.5e4, 0, np.nan, 1.0, 2.0]).astype(master_dtype)
    param = master.astype(np.float32).astype(dtype)
    changed = param.copy()
    changed[:3], changed[10:] = [-0.0, 0, -np.nan], [1.0, 1.0, np.nan, np.nextafter(np.float32(2), 3) * 1.01]
    assert np.asarray(transform(rounds_to)(master, param)).all()
    expected = np.arange(len(master)) < 10
    assert_same_bits(np.asarray(transform(rounds_to)(master, changed)), expected)
