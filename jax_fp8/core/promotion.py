"""JAX's and Flax's own functions, where a user has asked for strict arithmetic.

What this library computes names every dtype and every shape, so it also runs under
`jax.numpy_dtype_promotion("strict")` and `jax.numpy_rank_promotion("raise")`. JAX's attention and Flax's norms mix
bfloat16 with float32, and do not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import jax
import jax.numpy as jnp


@contextmanager
def implicit_promotion() -> Iterator[None]:
    """Let what is traced in this context mix dtypes and ranks as `jax.numpy` does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool,
    implementation: Literal["cudnn", "xla"] | None,
) -> jax.Array:
    """`jax.nn.dot_product_attention`. XLA's works in float32 where promotion is strict, and rounds in the end:
    no program can be made of its gradient in 16 bits there, a product of bfloat16 by float32."""
    dtype = query.dtype
    if implementation != "cudnn" and jax.config.jax_numpy_dtype_promotion == "strict":
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    with implicit_promotion():
        options = {"is_causal": is_causal, "implementation": implementation}
        return jax.nn.dot_product_attention(query, key, value, **options).astype(dtype)
