"""The number that a step of the reference starts from: the master, or a param that somebody has changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_same_bits

from jax_fp8.kernels.adam_arrays import Coefficients, Leaf
from jax_fp8.kernels.adam_leaf import adam_leaf, rounds_at_random

RATE = 2.0**-10
NUMBERS = {"rate": RATE, "b1": 0.0, "one_minus_b1": 1.0, "b2": 0.0, "one_minus_b2": 1.0, "eps": 2.0**-40}
NUMBERS |= {"weight_decay": 0.0, "correction1": 1.0, "correction2": 1.0, "grad_scale": 1.0, "apply": 1.0}
COEFFICIENTS = Coefficients(**{name: jnp.float32(number) for name, number in NUMBERS.items()})
DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
MASTERS = pytest.mark.parametrize("master_dtype", [jnp.float32, jnp.float16])


def step(master, param, gradient):
    zeros = jnp.zeros(master.shape)
    leaf = Leaf(gradient, zeros, zeros, param, master)
    return jax.jit(lambda leaf: adam_leaf(leaf, COEFFICIENTS, jnp.uint32(0), 0, True)[0])(leaf)


@MASTERS
@DTYPES
def test_a_changed_param_is_the_master(dtype, master_dtype):
    """One element in the middle: all others start from their masters, whose bits the param does not have."""
    master = jax.random.normal(jax.random.key(0), (33, 7)).astype(master_dtype)
    param = master.astype(jnp.float32).astype(dtype)
    changed = param.at[16, 3].set(2.5)
    gradient = jnp.ones_like(master, jnp.float32)
    before, after = step(master, param, gradient), step(master, changed, gradient)
    expected = np.asarray(master, np.float32) - np.float32(RATE)
    np.testing.assert_allclose(np.asarray(before.master, np.float32), expected, rtol=2e-3, atol=1e-6)
    apart = np.asarray(before.master) != np.asarray(after.master)
    assert list(zip(*np.nonzero(apart), strict=True)) == [(16, 3)]
    assert abs(float(after.master[16, 3]) - (2.5 - RATE)) < 1e-3
    still = step(master, param, jnp.zeros_like(gradient))
    assert_same_bits(still.master, master)
    assert (np.asarray(master, np.float32) != np.asarray(param, np.float32)).any() or master_dtype == dtype


@DTYPES
def test_zeros_and_nans(dtype):
    """A zero of the other sign is no change, nor is another NaN; a number in the place of a NaN is one."""
    master = jnp.float32([1e-42, -0.0, jnp.nan, jnp.nan, 1.0, jnp.inf])
    param = jnp.array([-0.0, 0.0, -jnp.nan, 2.0, jnp.nan, 3.0], dtype)
    updated = np.asarray(step(master, param, jnp.zeros(6)).master)
    np.testing.assert_array_equal(updated, np.float32([0, 0, np.nan, 2, np.nan, 3]))
    assert np.signbit(updated[1])  # the master's


def test_which_moments_are_rounded_at_random():
    wide, narrow = jnp.zeros(3), jnp.zeros(3, jnp.bfloat16)
    assert [rounds_at_random(*of) for of in ((wide, wide), (wide, narrow), (narrow, wide))] == [False, True, True]
