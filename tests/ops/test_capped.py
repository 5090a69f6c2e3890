"""A soft cap: linear near zero, bounded far from it, and the slope that its gradient has."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.ops.capped import capped


def test_a_cap_against_numpy():
    x = np.linspace(-40, 40, 81)
    np.testing.assert_allclose(capped(jnp.float32(x), 5.0), 5 * np.tanh(x / 5), rtol=1e-6)
    slope = jax.vmap(jax.grad(lambda x: capped(x, 5.0)))(jnp.float32(x))
    np.testing.assert_allclose(slope, 1 - np.tanh(x / 5) ** 2, atol=1e-6)
    assert capped(x, None) is x
