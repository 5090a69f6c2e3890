"""Token ids: they arrive in any integer dtype, and the library compares them in int32.

    uint8, uint16, int64, ... ─as_ids→ int32

Bytes come as uint8 and files of tokens as uint16. The size of a vocabulary, or -100, does not fit into these dtypes:
in a comparison it would wrap around and equal the id of another token.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.checks import ARRAYS, describe
from jax_fp8.core.types import Batch

SMALLEST, LARGEST = -(2**31), 2**31 - 1


def as_ids(ids: Any) -> Any:
    """Integers as int32. One that int32 cannot hold becomes the smallest or the largest int32, which is no token.
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


def check_ids(name: str, ids: object) -> None:
    """Raise unless this is an array of integers, of any dtype. True is no token, and neither is 1.0."""
    if not isinstance(ids, ARRAYS) or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {describe(ids)}; pass token numbers")


def is_token(ids: jax.Array, vocab: int) -> jax.Array:
    """Which of these int32 numbers a vocabulary of this size has."""
    return (ids >= 0) & (ids < vocab)


def check_integers_are_kept(batch: Batch) -> None:
    """Raise where jax would cut a 64-bit integer of NumPy to its last 32 bits, which are another number."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iu" or leaf.dtype.itemsize < 8 or not leaf.size:
            continue
        limits = np.iinfo(np.int32 if leaf.dtype.kind == "i" else np.uint32)
        wrong = next((int(x) for x in (leaf.min(), leaf.max()) if not limits.min <= x <= limits.max), None)
        if wrong is not None:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} must hold integers of at most 32 bits, to which jax cuts those of "
                f"{leaf.dtype.name}, got {wrong}; give it smaller numbers"
            )
