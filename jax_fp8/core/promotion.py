"""Calls of JAX's and Flax's own functions where a user has asked for strict arithmetic.

This library names every dtype and every shape, so it also runs under `jax.numpy_dtype_promotion("strict")` and
`jax.numpy_rank_promotion("raise")`. JAX's attention and Flax's norms mix bfloat16 with float32, so they do not.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def implicit_promotion() -> Iterator[None]:
    """Functions traced in this context may mix dtypes and ranks as `jax.numpy` allows by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
