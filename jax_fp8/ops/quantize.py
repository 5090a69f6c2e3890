"""Quantize: `values = saturate(f32(x) * (1 / scale))`, rounded once to nearest even, with the amax of `x` measured in the same pass.

Overflow and ±inf saturate to ±fp8_max; NaN becomes the one byte 0x7F. `amax` is max|x| over everything that is not NaN.
Hopper's FP8 GEMM wants both operands contiguous along the contracting dim, so a tensor that feeds two GEMMs is needed in two orientations:
`quantize_transpose` writes both from one read of `x`.

Subnormal float32 inputs (below 2**-126 in size) count on the GPU; XLA's CPU compiler flushes them to zero.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.formats import fp8_max
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.ops.amax import amax_reference, as_matrix
from jax_fp8.ops.dispatch import Split, dispatch, pmax

NAN_BYTE = np.uint8(0x7F)


def quantize_reference(x: jax.Array, dtype: jax.typing.DTypeLike, scale: jax.Array) -> jax.Array:
    """The FP8 values of `x`, of any shape."""
    scaled = x.astype(jnp.float32) * (np.float32(1) / scale)
    largest = fp8_max(dtype)
    rounded = jnp.clip(scaled, -largest, largest).astype(dtype)
    return jnp.where(jnp.isnan(scaled), lax.bitcast_convert_type(NAN_BYTE, dtype), rounded)


def quantize(x: jax.Array, dtype: jax.typing.DTypeLike, scale: jax.Array) -> Fp8Array:
    """Quantize with a given scale, saturating.

    Args:
      x: float32, bfloat16 or float16, of any shape.
      dtype: E4M3 or E5M2.
      scale: float32 scalar, positive; `x ≈ values * scale`.
    """
    return quantize_with_amax(x, dtype, scale)[0]


def quantize_with_amax(x: jax.Array, dtype: jax.typing.DTypeLike, scale: jax.Array) -> tuple[Fp8Array, jax.Array]:
    """`quantize`, and the amax of `x`, f32[]."""
    scale = _checked(x, dtype, scale)
    values, amax = dispatch("m n, -> m n, ", partial(_kernel, dtype), partial(_reference, dtype), as_matrix(x), scale)
    return Fp8Array(values.reshape(x.shape), scale), amax


def quantize_transpose(
    x: jax.Array, dtype: jax.typing.DTypeLike, scale: jax.Array
) -> tuple[Fp8Array, Fp8Array, jax.Array]:
    """Quantize a matrix (m, n) in both orientations: its (m, n), its transpose (n, m), and its amax f32[]."""
    scale = _checked(x, dtype, scale)
    if x.ndim != 2:
        raise ValueError(f"quantize_transpose needs a matrix, got shape {x.shape}; flatten the leading dims")
    kernel, reference = partial(_transpose_kernel, dtype), partial(_transpose_reference, dtype)
    values, transposed, amax = dispatch("m n, -> m n, n m, ", kernel, reference, x, scale)
    return Fp8Array(values, scale), Fp8Array(transposed, scale), amax


def _kernel(dtype, x, scale, split: Split):  # (m, n), () -> (m, n), ()
    call = jax.ffi.ffi_call("jax_fp8_quantize", (jax.ShapeDtypeStruct(x.shape, dtype), _AMAX))
    values, amax = call(x, scale)
    return values, pmax(amax, split, "m", "n")


def _reference(dtype, x, scale, split: Split):
    return quantize_reference(x, dtype, scale), pmax(amax_reference(x), split, "m", "n")


def _transpose_kernel(dtype, x, scale, split: Split):  # (m, n), () -> (m, n), (n, m), ()
    shapes = jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct(x.shape[::-1], dtype), _AMAX
    values, transposed, amax = jax.ffi.ffi_call("jax_fp8_quantize_transpose", shapes)(x, scale)
    return values, transposed, pmax(amax, split, "m", "n")


def _transpose_reference(dtype, x, scale, split: Split):
    values, amax = _reference(dtype, x, scale, split)
    return values, values.T, amax


_AMAX = jax.ShapeDtypeStruct((), jnp.float32)


def _checked(x, dtype, scale) -> jax.Array:
    fp8_max(dtype)  # says what it must be
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"quantize needs float32, bfloat16 or float16, got {x.dtype}; cast first")
    scale = jnp.asarray(scale, jnp.float32)
    if scale.shape != ():
        raise ValueError(f"scale must be a scalar, got shape {scale.shape}; quantize with one scale per tensor")
    return scale
