"""Scales of moments in FP8: no element exceeds them, and they waste little."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

SHAPE = (32, 32)


@pytest.mark.parametrize("master_dtype", [jnp.float32, jnp.float16, "remainder"])
def test_weights_count_where_decay_is_a_part_of_the_gradient(master_dtype):
    """The largest weight, also one that somebody has put there; and no bits of a remainder, which look like 65,535."""
    tx = fp8.fused_adam(1e-3, weight_decay=1.0, adam_w_mode=False, mu_dtype=fp8.E4M3, master_dtype=master_dtype)
    params = {"w": jax.random.normal(jax.random.key(0), SHAPE).astype(jnp.bfloat16)}
    state, edited = tx.init(params), {"w": params["w"].at[0, 0].set(1000)}
    for given, largest in ((params, float(jnp.max(jnp.abs(params["w"])))), (edited, 1000)):
        mu = jax.jit(tx.update)({"w": jnp.zeros(SHAPE)}, state, given)[1].mu["w"]
        assert 0.4 < np.abs(np.asarray(mu.values, np.float32)).max() / 448 <= 1
        np.testing.assert_allclose(np.abs(np.asarray(mu.dequantize())).max(), 0.1 * largest, rtol=0.13)
