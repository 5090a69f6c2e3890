"""What is strict stays strict outside of the context."""

import jax
import jax.numpy as jnp
import pytest

from jax_fp8.core.promotion import implicit_promotion

pytestmark = pytest.mark.versions


def test_implicit_promotion_ends_with_its_context():
    def mixed():
        return jnp.ones((2, 2), jnp.bfloat16) + jnp.ones(2, jnp.float32)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        with implicit_promotion():
            assert mixed().dtype == jnp.float32
        with pytest.raises(ValueError, match="promotion"):
            mixed()
