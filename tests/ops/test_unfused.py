"""A norm and an activation as ops: the gradients of autodiff through their definitions, from a few kept arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jax_fp8.kernels.activation_functions import activate
from jax_fp8.kernels.norm import NormParameters, normalize
from jax_fp8.ops.unfused import apply_activation, apply_norm

X = jax.random.normal(jax.random.key(0), (2, 24, 64)) * 3 + 1
WEIGHTS = jax.random.normal(jax.random.key(1), X.shape)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("return_input", [False, True])
def test_norm(has_bias, return_input):
    scale, bias = jax.random.normal(jax.random.key(2), (2, 64))
    norm = NormParameters(scale, bias if has_bias else None)

    def loss(x, norm):
        out = apply_norm(x, norm, 1e-6, jnp.float32, return_input=return_input)
        y, residual = out if return_input else (out, 0 * x)
        return jnp.sum(WEIGHTS * y) + jnp.sum(jnp.sin(residual))

    def expected(x, norm):
        y = normalize(x, norm, 1e-6, jnp.float32)[0]
        return jnp.sum(WEIGHTS * y) + (jnp.sum(jnp.sin(x)) if return_input else 0)

    (value, grads), (wanted, wanted_grads) = (jax.jit(jax.value_and_grad(f, (0, 1)))(X, norm) for f in (loss, expected))
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("activation", ["gelu", "silu", "squared_relu", "swiglu", "geglu"])
def test_activation(activation):
    def gradient(function):
        weights = WEIGHTS[..., : jax.eval_shape(lambda x: activate(x, activation), X).shape[-1]]
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(weights * function(x, activation))))(X)

    (value, grad), (wanted, wanted_grad) = gradient(apply_activation), gradient(activate)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(grad, wanted_grad, atol=1e-5 * np.abs(wanted_grad).max())


def test_only_inputs_are_kept():
    """Autodiff through the definitions keeps float32 arrays; the ops keep the bfloat16 input, and the statistics."""
    x = X.astype(jnp.bfloat16)
    norm = NormParameters(jnp.ones(64), None)

    def kept(function):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(jax.vjp(function, x)[1]))

    assert kept(lambda x: apply_norm(x, norm, 1e-6, jnp.bfloat16)) < 1.2 * x.nbytes + 4 * 64
    assert kept(lambda x: apply_activation(x, "swiglu")) == x.nbytes
    assert kept(lambda x: normalize(x, norm, 1e-6, jnp.bfloat16)[0]) > 2 * x.nbytes
    reference.assert_same_bits(apply_activation(x, "swiglu"), activate(x, "swiglu"))
