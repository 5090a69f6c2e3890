"""A cached weight: its two views, and that it travels through transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8 import E4M3, Fp8Array
from jax_fp8.core.cached_weight import CachedWeight

pytestmark = pytest.mark.versions


def test_views_share_the_scale():
    values = jnp.arange(6, dtype=jnp.float32).reshape(2, 3).astype(E4M3)
    cached = CachedWeight(values, values.T, jnp.float32(0.5), jnp.float32(2.5))
    assert isinstance(cached.straight, Fp8Array)
    np.testing.assert_array_equal(cached.straight.dequantize(), np.arange(6).reshape(2, 3) / 2)
    np.testing.assert_array_equal(cached.transposed.dequantize(), cached.straight.dequantize().T)
    through = jax.jit(lambda weight: weight)(cached)
    assert isinstance(through, CachedWeight)
    assert float(through.amax) == 2.5
