"""Numbers in few bits, bit for bit against NumPy, and what must hold of them: 16 bits that complete a param, roundings
that are fair, and moments in FP8 with which an optimizer takes nearly the same steps.

Left out are subnormal float32 numbers, which XLA's CPU compiler flushes to zero.
"""

from typing import NamedTuple

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
from jax_fp8.optim.fused_adam import fused_adam
from jax_fp8.optim.updates import InPlace, apply_updates

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


# ---- an optimizer that keeps its numbers so --------------------------------------------------------------------------

MODES = pytest.mark.parametrize("in_place", [None, InPlace()], ids=["deltas", "in_place"])


def make_step(tx, in_place):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **({} if in_place is None else {"in_place": in_place}))
        return apply_updates(params, updates), state

    return step


@MODES
def test_remainders_are_float32_masters_bit_for_bit(in_place):
    """400,000 elements, 50 steps: some hundred masters come to lie on a tie, and none stays there."""
    random = np.random.default_rng(0)
    params, *gradients = (jnp.asarray(random.normal(size=400_000), jnp.bfloat16) for _ in range(5))
    wide, narrow = fused_adam(1e-3), fused_adam(1e-3, master_dtype="remainder")
    wide_params, wide_state, wide_step = params, wide.init(params), make_step(wide, in_place)
    narrow_params, narrow_state, narrow_step = params, narrow.init(params), make_step(narrow, in_place)
    on_tie = beside = further = 0
    for i in range(50):
        wide_params, wide_state = wide_step(wide_params, wide_state, gradients[i % 4])
        narrow_params, narrow_state = narrow_step(narrow_params, narrow_state, gradients[i % 4])
        master = np.asarray(wide_state.master)
        assert_same_bits(narrow_params, wide_params)
        assert_same_bits(narrow_params, master.astype(ml_dtypes.bfloat16))
        assert_same_bits(master_of(narrow_params, narrow_state.master), master)
        assert_same_bits(narrow_state.mu, wide_state.mu)
        assert_same_bits(narrow_state.nu, wide_state.nu)
        low = np.bincount(master.view(np.uint32) % 2**17, minlength=2**17)
        on_tie, beside, further = on_tie + low[0x18000], beside + low[0x18001], further + low[0x18002]
    assert on_tie == 0
    assert beside > 1.4 * further > 50  # those that were moved, and those that would be there anyway


@MODES
def test_given_masters_on_ties(in_place):
    """Half of the masters lie between two params; with remainders too, the next step starts from them."""
    high = np.arange(0x3F00, 0x4100, dtype=np.uint32)
    low = np.where(high % 4 < 2, 0x8000, 0x1234).astype(np.uint32)
    master = jnp.asarray((high << 16 | low).view(np.float32))
    params = master.astype(jnp.bfloat16)
    grads = jnp.asarray(np.random.default_rng(0).normal(size=high.shape), jnp.float32)
    states = []
    for master_dtype in (jnp.float32, "remainder"):
        tx = fused_adam(1e-3, master=master, master_dtype=master_dtype)
        p, state, step = params, tx.init(params), make_step(tx, in_place)
        for _ in range(3):
            p, state = step(p, state, grads)
        states.append((p, state))
    (wide, wide_state), (narrow, narrow_state) = states
    assert_same_bits(narrow, wide)
    assert_same_bits(master_of(narrow, narrow_state.master), wide_state.master)
    moved = np.asarray(wide_state.master) - np.asarray(master)
    assert np.abs(moved).max() > 1e-3


NOISY = (64, 64)
SPIKE, AWAKE = 60, 100


def noisy_gradients() -> np.ndarray:
    """(steps, ...): signal and noise of many sizes, one step a hundred times too large, and rows that wake up late."""
    random = np.random.default_rng(0)
    sizes = np.exp(random.normal(size=NOISY))
    gradients = sizes * (random.normal(size=(200, *NOISY)) + 0.3)
    gradients[SPIKE] *= 100
    gradients[:AWAKE, ::2] = 0
    return gradients.astype(np.float32)


def updates_of(tx, gradients) -> np.ndarray:
    params = {"w": jnp.zeros(NOISY)}

    def step(state, gradient):
        updates, state = tx.update({"w": gradient}, state, params)
        return state, updates["w"]

    return np.asarray(jax.jit(lambda g: jax.lax.scan(step, tx.init(params), g)[1])(gradients), np.float64)


def updates_with_nearest_rounding(gradients, dtype) -> np.ndarray:
    """Adam whose second moment is kept as an FP8 square root that is rounded to nearest even."""
    m, root, largest, updates = 0.0, 0.0, 0.0, []
    for t, g in enumerate(gradients.astype(np.float64), start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * root**2 + 0.001 * g**2
        largest = np.sqrt(0.999 * largest**2 + 0.001 * np.abs(g).max() ** 2)
        scale = largest / float(reference.FP8_MAX[np.dtype(dtype)])
        root = (np.sqrt(v) / scale).astype(dtype).astype(np.float64) * scale
        updates.append(-(m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8))
    return np.array(updates)


class UpdateErrors(NamedTuple):
    """Of updates (steps, ...) against exact ones."""

    mean: float  # mean error over mean update, at the worst step
    largest: float  # largest update over largest exact one, at the worst step
    bias: float  # how much too large the updates are on average at the end


def update_errors(updates, exact) -> UpdateErrors:
    dims = (1, 2)
    mean = np.abs(updates - exact).mean(dims) / np.abs(exact).mean(dims)
    largest = np.abs(updates).max(dims) / np.abs(exact).max(dims)
    return UpdateErrors(mean.max(), largest.max(), np.abs(updates[-20:]).mean() / np.abs(exact[-20:]).mean() - 1)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(E4M3, UpdateErrors(0.15, 1.4, 0.02)), (E5M2, UpdateErrors(0.36, 1.85, 0.03))],
    ids=["E4M3", "E5M2"],
)
def test_updates_from_fp8_moments(dtype, bound):
    """Measured: 0.13, 1.28, 0.009 in E4M3 and 0.22, 1.65, 0.020 in E5M2.

    Rounding second moments to nearest is the negative control: 0.33, 1.54, 0.30 and 0.59, 1.96, 0.55, as in rows that
    wake up late they cease to grow.
    """
    gradients = noisy_gradients()
    exact = updates_of(fused_adam(1.0), gradients)
    errors = update_errors(updates_of(fused_adam(1.0, mu_dtype=dtype, nu_dtype=dtype), gradients), exact)
    assert 0.01 < errors.mean < bound.mean
    assert 1 < errors.largest < bound.largest
    assert abs(errors.bias) < bound.bias
    nearest = update_errors(updates_with_nearest_rounding(gradients, dtype), exact)
    assert nearest.mean > 1.4 * bound.mean
    assert nearest.largest > bound.largest
    assert nearest.bias > 10 * bound.bias


LARGE, SMALL = 200, 0.01


def moments_after_large_gradients(tx, steps, gradients) -> np.ndarray:
    """The update by a gradient of 0.01 at the end, for elements whose gradient was 0.01 but in the first steps."""
    p = jnp.zeros(gradients)

    def body(i, state):
        g = jnp.where(i < LARGE, 1.0, SMALL) * jnp.ones_like(p)
        return tx.update(g, state, p)[1]

    state = jax.jit(lambda state: jax.lax.fori_loop(0, steps, body, state))(tx.init(p))
    return np.asarray(tx.update(jnp.full_like(p, SMALL), state, p)[0])


@pytest.mark.parametrize("dtype", [BF16, E4M3, E5M2])
def test_a_second_moment_falls_again(dtype):
    """As in float32, 8,000 steps after 200 large gradients; the control rounds to nearest, as bfloat16 would."""
    exact = moments_after_large_gradients(fused_adam(1e-3), 8_000, 4).mean()
    updates = moments_after_large_gradients(fused_adam(1e-3, nu_dtype=dtype), 8_000, 1024)
    assert abs(updates.mean() / exact - 1) < {BF16: 0.01, E4M3: 0.05, E5M2: 0.1}[dtype]

    v = np.float32(1 - 0.999**LARGE)
    for _ in range(LARGE, 8_000):
        v = (np.float32(0.999) * v + np.float32(0.001 * SMALL**2)).astype(BF16).astype(np.float32)
    assert v > 100 * SMALL**2


@pytest.mark.parametrize("b1", [0.99, 0.999])
def test_a_first_moment_in_bfloat16_follows_its_gradient(b1):
    """From 1 to 1.3, where an increment is less than half a step; rounded to nearest it stays where it is."""
    tx, p, steps = fused_adam(1e-3, b1=b1, mu_dtype=BF16), jnp.zeros(4096), round(5 / (1 - b1))
    state = tx.init(p)._replace(mu=jnp.ones_like(p, BF16))
    body = jax.jit(lambda s: jax.lax.fori_loop(0, steps, lambda _, s: tx.update(jnp.full_like(p, 1.3), s, p)[1], s))
    exact = 1.3 - 0.3 * b1**steps
    assert abs(np.asarray(body(state).mu, np.float64).mean() - exact) < 2e-3
    m = np.float32(1)
    for _ in range(steps):
        m = np.float32(b1 * m + (1 - b1) * 1.3).astype(BF16).astype(np.float32)
    assert exact - m > 0.05


@pytest.mark.parametrize("dtype", [BF16, E4M3, E5M2])
def test_moments_of_tiny_gradients(dtype):
    """Gradients of 1e-8, whose squares are 1e-16: the update is that of float32 moments."""
    p, g = jnp.zeros(4096), jnp.full(4096, 1e-8)

    def last_update(tx):
        state = jax.jit(lambda s: jax.lax.fori_loop(0, 50, lambda _, s: tx.update(g, s, p)[1], s))(tx.init(p))
        return np.asarray(tx.update(g, state, p)[0], np.float64).mean()

    exact = last_update(fused_adam(1e-3, eps=1e-12))
    assert abs(last_update(fused_adam(1e-3, eps=1e-12, mu_dtype=dtype, nu_dtype=dtype)) / exact - 1) < 0.02
    assert abs(exact + 1e-3) < 1e-5


@pytest.mark.parametrize(("dtype", "bits"), [(E4M3, 3), (E5M2, 2)], ids=["E4M3", "E5M2"])
def test_scales_of_fp8_moments_neither_saturate_nor_waste(dtype, bits):
    """At every step, spike included: mu and the root of nu within a step of FP8."""
    smallest = SMALLEST[dtype]
    tx, params = fused_adam(1.0, mu_dtype=dtype, nu_dtype=dtype), {"w": jnp.zeros(NOISY)}
    state, step = tx.init(params), jax.jit(tx.update)
    largest = float(fp8_max(dtype))
    smallest_use = 1.0
    for g in noisy_gradients()[: SPIKE + 20]:
        before = reference.dequantize(*_parts(state.mu["w"])), reference.dequantize(*_parts(state.nu["w"]))
        _, state = step({"w": g}, state, params)
        m, root = 0.9 * before[0] + 0.1 * g, np.sqrt(0.999 * before[1] ** 2 + 0.001 * np.square(g, dtype=np.float64))
        for moment, exact, error_in_steps in ((state.mu["w"], m, 1.0), (state.nu["w"], root, 1.0)):
            values, scale = _parts(moment)
            error = np.abs(reference.dequantize(values, scale) - exact)
            allowed = error_in_steps * np.maximum(2.0**-bits * np.abs(exact), smallest * scale)
            assert (error <= allowed * (1 + 1e-5)).all()
            used = np.abs(values.astype(np.float32)).max() / largest
            smallest_use = min(smallest_use, used)
            assert used <= 1
    assert smallest_use > 2.0**-5


def _parts(moment):
    return np.asarray(moment.values), np.asarray(moment.scale)
