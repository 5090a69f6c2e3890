"""An optimizer that keeps its numbers in few bits: remainders that are float32 masters, and moments in 16 and 8 bits
with which it takes nearly the same steps.
"""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3, E5M2, fp8_max
from jax_fp8.kernels.storage import master_of
from jax_fp8.optim.fused_adam import fused_adam
from jax_fp8.optim.updates import InPlace, apply_updates

BF16 = jnp.bfloat16
SMALLEST = {E4M3: 2.0**-9, E5M2: 2.0**-16}

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


@cache
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


@cache
def exact_updates() -> np.ndarray:
    return updates_of(fused_adam(1.0), noisy_gradients())


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
    gradients, exact = noisy_gradients(), exact_updates()
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
