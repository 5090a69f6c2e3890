"""The transpose of an FP8 matrix, (m, k) to (k, m): bytes are moved, and none is changed.

A cast writes both orientations from one read. This is for values that arrive in one only: gathered from other devices,
where every byte counts. It reads and writes each byte once, half of what a cast of bfloat16 in both orientations moves.
"""

import jax
import jax.numpy as jnp

from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.kernels.dispatch import Split, dispatch

TARGET = "jax_fp8_transpose"


def transpose(x: jax.Array) -> jax.Array:
    """Transpose the values of an FP8 matrix; on a mesh each shard is transposed where it is."""
    if x.ndim != 2:
        raise ValueError(f"transpose needs a matrix, got shape {x.shape}; flatten the leading dims")
    if x.dtype not in (E4M3, E5M2):
        raise ValueError(f"transpose needs values of E4M3 or E5M2, got {x.dtype}; quantize first, or use x.T")
    (result,) = dispatch("m k -> k m", _kernel, _reference, x)
    return result


def transpose_reference(x: jax.Array) -> jax.Array:
    """(m, k) to (k, m)."""
    return jnp.transpose(x)


def _kernel(x: jax.Array, split: Split):
    return (jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(x.shape[::-1], x.dtype))(x),)


def _reference(x: jax.Array, split: Split):
    return (transpose_reference(x),)
