"""Numbers of tokens as they arrive, of any integer dtype, and as int32, in which all of the library compares them.

    uint8, uint16, int64, ... ─as_ids→ int32

Bytes come as uint8 and files of tokens as uint16. A vocabulary or -100 does not fit into these: compared as they are,
numbers would wrap, and be those of other tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.checks import describe, is_array

SMALLEST, LARGEST = -(2**31), 2**31 - 1


def as_ids(ids: Any) -> Any:
    """Integers as int32. One that int32 cannot hold becomes its smallest or its largest number, which is no token.
    NumPy's arrays stay NumPy's.
    """
    if ids.dtype == np.int32:
        return ids
    limits = jnp.iinfo(ids.dtype)
    least, most = max(limits.min, SMALLEST), min(limits.max, LARGEST)
    if (least, most) != (limits.min, limits.max):
        clip = jnp.clip if isinstance(ids, jax.Array) else np.clip
        ids = clip(ids, ids.dtype.type(least), ids.dtype.type(most))
    return ids.astype(np.int32)


def check_ids(name: str, ids: Any) -> None:
    """Raise unless these are integers, of any dtype: True is no token, and neither is 1.0."""
    if not is_array(ids) or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {describe(ids)}; pass token numbers")


def is_token(ids: jax.Array, vocab: int) -> jax.Array:
    """Which of these int32 numbers a vocabulary of this size has."""
    return (ids >= 0) & (ids < vocab)
