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


def check_integers_are_kept(batch: Any) -> None:
    """Raise where jax would cut an integer of NumPy's 64 bits to its last 32, and so make another number of it."""
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
