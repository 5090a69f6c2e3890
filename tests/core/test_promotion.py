"""Attention where promotion is strict: the same numbers within bfloat16, and gradients that compile."""

import jax
import jax.numpy as jnp
import pytest
import reference

from jax_fp8.core.promotion import attend, implicit_promotion

pytestmark = pytest.mark.versions


def gradients(implementation="xla"):
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 8, 2, 16), jnp.bfloat16)

    def loss(*args):
        return jnp.sum(attend(*args, is_causal=True, implementation=implementation).astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)


def test_strict_attention_is_attention():
    expected = gradients()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        actual = gradients()
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == jnp.bfloat16
        reference.assert_close(one, other, "bfloat16")


def test_implicit_promotion_ends_with_its_context():
    def mixed():
        return jnp.ones((2, 2), jnp.bfloat16) + jnp.ones(2, jnp.float32)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        with implicit_promotion():
            assert mixed().dtype == jnp.float32
        with pytest.raises(ValueError, match="promotion"):
            mixed()
