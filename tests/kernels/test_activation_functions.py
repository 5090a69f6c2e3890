"""Activations and their gradients against float64."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import plain
import pytest
from reference import assert_close, assert_same_bits

from jax_fp8.kernels.activation_functions import activate, activate_backward, is_gated, row_weights_gradient

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
    both = jax.jit(lambda dy, x: (activate(x, activation), activate_backward(dy, x, activation)))
    actual, actual_dx = both(dy, x)
    assert (actual.dtype, actual_dx.dtype) == (dtype, dtype)
    assert_close(actual, y, np.dtype(dtype).name)
    assert_close(actual_dx, dx, np.dtype(dtype).name)


@pytest.mark.parametrize("group", [list(plain.ACTIVATIONS), list(plain.GATES)], ids=["plain", "gated"])
def test_no_activation_passes_for_another(group):
    """Negative control: even the two GELUs, a thousandth apart, are told apart."""
    x = array(0, 24, 32)
    actual = jax.jit(lambda x: {name: activate(x, name) for name in group})(x)
    y = {name: expected(x, name, actual[name])[0] for name in group}
    for name, other in itertools.permutations(group, 2):
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(actual[name], y[other], "float32")


@pytest.mark.parametrize("activation", ALL)
def test_is_gated_says_which_dim_comes_out(activation):
    assert is_gated(activation) == (activation in plain.GATES)
    of = jax.eval_shape(lambda x: activate(x, activation), np.ones((3, 32), np.float32))
    assert of.shape == (3, 16 if is_gated(activation) else 32)


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


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_weights_of_rows(activation, dtype):
    """Results and all gradients against float64. Negative control: weights of other rows are not within the bounds."""
    x, weights = array(0, 24, 32, dtype=dtype), np.random.default_rng(5).uniform(0.1, 2, 24).astype(np.float32)
    dy = array(1, 24, 16 if is_gated(activation) else 32, dtype=dtype)

    def exact(x, weights):
        return plain.activate(x, activation) * weights[:, None]

    y, (dx, dweights) = plain.result_and_gradients(exact, dy, x, weights)

    @jax.jit
    def all_of(weights):
        backward = activate_backward(dy, x, activation, weights), row_weights_gradient(dy, x, activation)
        return activate(x, activation, weights), *backward

    name, found = np.dtype(dtype).name, all_of(weights)
    assert [array.dtype for array in found] == [dtype, dtype, np.float32]
    assert_close(found[0], y, name)
    assert_close(found[1], dx, name)
    assert_close(found[2], dweights, "float32")
    shifted = all_of(np.roll(weights, 1))
    for wrong, right in zip(shifted[:2], (y, dx), strict=True):
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(wrong, right, name)
    if dtype != np.float32:  # whose last bits depend on what XLA fuses
        assert_same_bits(all_of(np.ones(24, np.float32))[0], jax.jit(activate, static_argnums=1)(x, activation))
