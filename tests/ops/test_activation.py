"""Activations and their gradients against float64 formulas written anew."""

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import plain
import pytest
from reference import assert_close, assert_same_bits

from jax_fp8.ops.activation import activate, activate_backward, is_gated

ALL = [*plain.ACTIVATIONS, *plain.GATES]


def array(seed, *shape, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape, scale=2).astype(dtype)


def expected(x, activation, dy):
    y, (dx,) = plain.result_and_gradients(lambda x: plain.activate(x, activation), dy, x)
    return y, dx


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("activation", ALL)
def test_forward_and_backward(activation, dtype):
    x = array(0, 2, 12, 32, dtype=dtype)
    dy = array(1, 2, 12, 16 if is_gated(activation) else 32, dtype=dtype)
    y, dx = expected(x, activation, dy)
    actual, actual_dx = (
        activate(jnp.asarray(x), activation),
        activate_backward(jnp.asarray(dy), jnp.asarray(x), activation),
    )
    assert (actual.dtype, actual_dx.dtype) == (dtype, dtype)
    assert_close(actual, y, np.dtype(dtype).name)
    assert_close(actual_dx, dx, np.dtype(dtype).name)


@pytest.mark.parametrize("group", [list(plain.ACTIVATIONS), list(plain.GATES)], ids=["plain", "gated"])
def test_no_activation_passes_for_another(group):
    """Negative control: even the two GELUs, a thousandth apart, are told apart."""
    x = array(0, 24, 32)
    actual = {name: activate(jnp.asarray(x), name) for name in group}
    y = {name: expected(x, name, actual[name])[0] for name in group}
    for name, other in itertools.permutations(group, 2):
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(actual[name], y[other], "float32")


@pytest.mark.parametrize("activation", ALL)
def test_is_gated_says_which_dim_comes_out(activation):
    assert is_gated(activation) == (activation in plain.GATES)
    assert activate(jnp.ones((3, 32)), activation).shape == (3, 16 if is_gated(activation) else 32)


def test_the_gate_is_the_first_half():
    x = jnp.concatenate([jnp.full((1, 4), -5.0), jnp.full((1, 4), 2.0)], axis=-1)
    assert_same_bits(activate(x, "reglu"), np.zeros((1, 4), np.float32))
    assert_same_bits(activate(-x, "reglu"), np.full((1, 4), -10, np.float32))


@pytest.mark.parametrize(
    "call",
    [
        is_gated,
        lambda name: activate(jnp.ones(2), name),
        lambda name: activate_backward(jnp.ones(2), jnp.ones(2), name),
    ],
)
def test_an_unknown_activation_is_refused(call):
    with pytest.raises(ValueError, match=r"activation must be one of .*'gelu'.*'swiglu'.*, got 'tanh'"):
        call("tanh")
