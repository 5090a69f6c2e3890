"""Quantize: `values = saturate(f32(x) * (1 / scale))`, rounded once to nearest even, with the amax of `x` measured in the same pass.

Overflow and ±inf saturate to ±fp8_max; NaN becomes the one byte 0x7F. `amax` is max|x| over everything that is not NaN.
Hopper's FP8 GEMM wants both operands contiguous along the contracting dim, so a tensor that feeds two GEMMs is needed in two orientations:
`quantize_transpose` writes both from one read of `x`.

The scale is a scalar, or is found by the kernel itself where a `ScaleSource` says.

    x, source ─find the scale─ cast, measure→ values, amax, scale

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
from jax_fp8.ops.dispatch import Split, dispatch, gathered, pmax
from jax_fp8.ops.scale_source import SCALAR, ScaleSource

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


def quantize_with_amax(
    x: jax.Array, dtype: jax.typing.DTypeLike, scale: jax.Array | ScaleSource
) -> tuple[Fp8Array, jax.Array]:
    """`quantize` with a scale or where it comes from, and the amax of `x`, f32[]."""
    source = ScaleSource.of(scale)
    check_source_and_target(x.dtype, dtype)
    kernel, reference = partial(_kernel, dtype, source.rule), partial(_reference, dtype, source.rule)
    rule = f"m n, {source.dims} -> m n, , "
    values, amax, used = dispatch(rule, kernel, reference, as_matrix(x), source.array)
    return Fp8Array(values.reshape(x.shape), used), amax


def quantize_transpose(
    x: jax.Array, dtype: jax.typing.DTypeLike, scale: jax.Array | ScaleSource
) -> tuple[Fp8Array, Fp8Array, jax.Array]:
    """Quantize a matrix (m, n) in both orientations: its (m, n), its transpose (n, m), and its amax f32[]."""
    source = ScaleSource.of(scale)
    check_source_and_target(x.dtype, dtype)
    if x.ndim != 2:
        raise ValueError(f"quantize_transpose needs a matrix, got shape {x.shape}; flatten the leading dims")
    kernel, reference = (
        partial(_transpose_kernel, dtype, source.rule),
        partial(_transpose_reference, dtype, source.rule),
    )
    rule = f"m n, {source.dims} -> m n, n m, , "
    values, transposed, amax, used = dispatch(rule, kernel, reference, x, source.array)
    return Fp8Array(values, used), Fp8Array(transposed, used), amax


def check_source_and_target(x_dtype: jax.typing.DTypeLike, dtype: jax.typing.DTypeLike) -> None:
    """Raise unless the kernels quantize from the one dtype to the other."""
    fp8_max(dtype)  # says what it must be
    if x_dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"quantize needs float32, bfloat16 or float16, got {x_dtype}; cast first")


def _kernel(dtype, scale_rule, x, array, split: Split):  # (m, n), () or (r,) -> (m, n), (), ()
    call = jax.ffi.ffi_call("jax_fp8_quantize", (jax.ShapeDtypeStruct(x.shape, dtype), SCALAR, SCALAR))
    values, amax, scale = call(x, gathered(array, split, "r"), **scale_rule.attributes())
    return values, pmax(amax, split, "m", "n"), scale


def _reference(dtype, scale_rule, x, array, split: Split):
    scale = scale_rule.scale(array, dtype, split)
    return quantize_reference(x, dtype, scale), pmax(amax_reference(x), split, "m", "n"), scale


def _transpose_kernel(dtype, scale_rule, x, array, split: Split):  # (m, n), () or (r,) -> (m, n), (n, m), (), ()
    matrices = jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct(x.shape[::-1], dtype)
    call = jax.ffi.ffi_call("jax_fp8_quantize_transpose", (*matrices, SCALAR, SCALAR))
    values, transposed, amax, scale = call(x, gathered(array, split, "r"), **scale_rule.attributes())
    return values, transposed, pmax(amax, split, "m", "n"), scale


def _transpose_reference(dtype, scale_rule, x, array, split: Split):
    values, amax, scale = _reference(dtype, scale_rule, x, array, split)
    return values, values.T, amax, scale
