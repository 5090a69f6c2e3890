"""Quantize: `values = saturate(f32(x) * (1 / scale))`, rounded once to nearest even, with the amax of `x` measured in the same pass.

Overflow and ±inf saturate to ±fp8_max; NaN becomes the one byte 0x7F. `amax` is max|x| over everything that is not NaN.
Hopper's FP8 GEMM wants both operands contiguous along the contracting dim, so a tensor that feeds two GEMMs is needed in two orientations:
`quantize_transpose` writes both from one read of `x`.

The scale is a scalar, or is found by the kernel itself where a `ScaleSource` says: one of a vector of scales, or made from an amax. Both are
a few instructions, and as operations of their own would be a kernel launch each, three times a GEMM.

    x, source ─find the scale─ cast, measure→ values, amax, scale

Subnormal float32 inputs (below 2**-126 in size) count on the GPU; XLA's CPU compiler flushes them to zero.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.formats import fp8_max
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.recipe import CurrentScaling, Recipe
from jax_fp8.core.scale import current_scale
from jax_fp8.ops.amax import amax_reference, as_matrix
from jax_fp8.ops.dispatch import Split, dispatch, pmax

NAN_BYTE = np.uint8(0x7F)


@dataclass(frozen=True)
class ScaleSource:
    """Where the scale of a tensor comes from; see `row_of` and `from_amax`.

    Args:
      array: f32[] or f32[r].
      row: the element of `array`; 0 for a scalar.
      recipe: None when the element is a scale, or how to scale by it when it is the tensor's amax.
    """

    array: jax.Array
    row: int = 0
    recipe: Recipe | None = None

    @classmethod
    def row_of(cls, scales: jax.Array, row: int) -> "ScaleSource":
        """This one of several scales f32[r]."""
        return cls(scales, row)

    @classmethod
    def from_amax(cls, amax: jax.Array, recipe: Recipe) -> "ScaleSource":
        """`current_scale` of the tensor's amax f32[]."""
        return cls(amax, recipe=recipe)


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
    source = _checked(x, dtype, scale)
    how = source.row, source.recipe
    kernel, reference = partial(_kernel, dtype, *how), partial(_reference, dtype, *how)
    values, amax, used = dispatch(f"m n, {_dims(source)} -> m n, , ", kernel, reference, as_matrix(x), source.array)
    return Fp8Array(values.reshape(x.shape), used), amax


def quantize_transpose(
    x: jax.Array, dtype: jax.typing.DTypeLike, scale: jax.Array | ScaleSource
) -> tuple[Fp8Array, Fp8Array, jax.Array]:
    """Quantize a matrix (m, n) in both orientations: its (m, n), its transpose (n, m), and its amax f32[]."""
    source = _checked(x, dtype, scale)
    if x.ndim != 2:
        raise ValueError(f"quantize_transpose needs a matrix, got shape {x.shape}; flatten the leading dims")
    how = source.row, source.recipe
    kernel, reference = partial(_transpose_kernel, dtype, *how), partial(_transpose_reference, dtype, *how)
    rule = f"m n, {_dims(source)} -> m n, n m, , "
    values, transposed, amax, used = dispatch(rule, kernel, reference, x, source.array)
    return Fp8Array(values, used), Fp8Array(transposed, used), amax


def _kernel(dtype, row, recipe, x, array, split: Split):  # (m, n), () or (r,) -> (m, n), (), ()
    call = jax.ffi.ffi_call("jax_fp8_quantize", (jax.ShapeDtypeStruct(x.shape, dtype), _SCALAR, _SCALAR))
    values, amax, scale = call(x, _whole(array, split), **_attributes(row, recipe))
    return values, pmax(amax, split, "m", "n"), scale


def _reference(dtype, row, recipe, x, array, split: Split):
    scale = _whole(array, split)[row] if array.ndim else array
    if recipe is not None:
        scale = current_scale(scale, dtype, recipe)
    return quantize_reference(x, dtype, scale), pmax(amax_reference(x), split, "m", "n"), scale


def _transpose_kernel(dtype, row, recipe, x, array, split: Split):  # (m, n), () or (r,) -> (m, n), (n, m), (), ()
    matrices = jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct(x.shape[::-1], dtype)
    call = jax.ffi.ffi_call("jax_fp8_quantize_transpose", (*matrices, _SCALAR, _SCALAR))
    values, transposed, amax, scale = call(x, _whole(array, split), **_attributes(row, recipe))
    return values, transposed, pmax(amax, split, "m", "n"), scale


def _transpose_reference(dtype, row, recipe, x, array, split: Split):
    values, amax, scale = _reference(dtype, row, recipe, x, array, split)
    return values, values.T, amax, scale


_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def _attributes(row, recipe):
    """What is static of a `ScaleSource`, in the kernel's words."""
    current = isinstance(recipe, CurrentScaling)
    return {
        "row": np.int32(row),
        "from_amax": recipe is not None,
        "margin": np.int32(0 if recipe is None or current else recipe.margin),
        "amax_epsilon": np.float32(recipe.amax_epsilon if current else 0),
        "power_2_scale": current and recipe.power_2_scale,
    }


def _dims(source):
    return "r" if source.array.ndim else ""


def _whole(array, split):
    """All of the source, even where someone has split a vector of three scales: a row of a shard would be another row."""
    axes = split.get("r")
    return lax.all_gather(array, axes, tiled=True) if axes else array


def _checked(x, dtype, scale) -> ScaleSource:
    fp8_max(dtype)  # says what it must be
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"quantize needs float32, bfloat16 or float16, got {x.dtype}; cast first")
    if not isinstance(scale, ScaleSource):
        scale = jnp.asarray(scale, jnp.float32)
        if scale.shape != ():
            raise ValueError(f"scale must be a scalar, got shape {scale.shape}; quantize with one scale per tensor")
        return ScaleSource(scale)
    array = jnp.asarray(scale.array, jnp.float32)
    if array.ndim > 1 or not 0 <= scale.row < array.size:
        raise ValueError(
            f"a scale's source must be f32[] or f32[r] with the row it names, got shape {array.shape} and row {scale.row}; "
            "pass a vector of scales and a row of it"
        )
    return replace(scale, array=array)
