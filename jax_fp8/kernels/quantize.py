"""Quantize: `values = saturate(f32(x) * (1 / scale))`, rounded once to nearest even, with the amax of `x` measured in the same pass.

Overflow and ±inf saturate to ±fp8_max; NaN becomes the one byte 0x7F. `amax` is max|x| over everything that is not NaN.
Hopper's FP8 GEMM wants both operands contiguous along the contracting dim, so a tensor that feeds two GEMMs is needed in two orientations:
`quantize_transpose` writes both from one read of `x`, and `quantize_transpose_sums` the sums of its columns as well, the gradient of a bias.
Both take matrices side by side too, a tuple of (m, n_i), and make of them what they would of the one matrix (m, n), which is never put together.

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
from jax_fp8.kernels.amax import amax_reference, as_matrix
from jax_fp8.kernels.dispatch import Split, dispatch, gathered, pmax, psum
from jax_fp8.kernels.scale_source import SCALAR, ScaleSource

NAN_BYTE = np.uint8(0x7F)
ROWS_PER_PARTIAL_SUM = 128  # as in csrc/column_sums.h

# What an op makes of a matrix: the matrix itself (m, n) in FP8, its transpose (n, m), or both.
ORIENTATIONS = ("both", "straight", "transposed")
NOTHING = (0, 0)  # the shape of an operand or a result that a kernel does without

Matrices = jax.Array | tuple[jax.Array, ...]  # (m, n), or (m, n_i) side by side
MAX_MATRICES = 3  # queries, keys and values; as in csrc/quantize.h
COLUMNS = "abc"  # their letters in a rule


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
    x: Matrices, dtype: jax.typing.DTypeLike, scale: jax.Array | ScaleSource
) -> tuple[Fp8Array, Fp8Array, jax.Array]:
    """Quantize a matrix (m, n) in both orientations: its (m, n), its transpose (n, m), and its amax f32[]."""
    source = ScaleSource.of(scale)
    first, further, widths = _check_matrices("quantize_transpose", x, dtype)
    kernel, reference = (
        partial(_transpose_kernel, dtype, source.rule),
        partial(_transpose_reference, dtype, source.rule),
    )
    rule = f"m {widths[0]}, {source.dims}{_side_by_side(widths)} -> m n, n m, , "
    values, transposed, amax, used = dispatch(rule, kernel, reference, first, source.array, *further)
    return Fp8Array(values, used), Fp8Array(transposed, used), amax


def quantize_transpose_sums(
    x: Matrices, dtype: jax.typing.DTypeLike, scale: jax.Array | ScaleSource
) -> tuple[Fp8Array, Fp8Array, jax.Array, jax.Array]:
    """`quantize_transpose` of a matrix (m, n), and the sums of its columns in float32, (n,)."""
    source = ScaleSource.of(scale)
    first, further, widths = _check_matrices("quantize_transpose_sums", x, dtype)
    kernel, reference = partial(_sums_kernel, dtype, source.rule), partial(_sums_reference, dtype, source.rule)
    rule = f"m {widths[0]}, {source.dims}{_side_by_side(widths)} -> m n, n m, , , n"
    values, transposed, amax, used, sums = dispatch(rule, kernel, reference, first, source.array, *further)
    return Fp8Array(values, used), Fp8Array(transposed, used), amax, sums


def column_sums_reference(x: jax.Array) -> jax.Array:
    """The sums of the columns of (m, n) in float32, (n,)."""
    return jnp.sum(x, axis=0, dtype=jnp.float32)


def sums_results(shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What a kernel that sums the columns of a matrix returns: the sums, and before them those of every 128 rows, which it adds up."""
    m, n = shape
    return jax.ShapeDtypeStruct((n,), jnp.float32), jax.ShapeDtypeStruct(
        (-(-m // ROWS_PER_PARTIAL_SUM), n), jnp.float32
    )


def _check_matrices(operation, x: Matrices, dtype) -> tuple[jax.Array, tuple[jax.Array, ...], str]:
    """The first matrix, those beside it, and a letter for the columns of each: of one matrix "n", which a mesh may split."""
    matrices = x if isinstance(x, tuple) else (x,)
    if not 1 <= len(matrices) <= MAX_MATRICES:
        raise ValueError(f"{operation} takes 1 to {MAX_MATRICES} matrices side by side, got {len(matrices)}")
    for matrix in matrices:
        check_source_and_target(matrix.dtype, dtype)
        if matrix.ndim != 2:
            raise ValueError(f"{operation} needs a matrix, got shape {matrix.shape}; flatten the leading dims")
    if len({(matrix.shape[0], matrix.dtype) for matrix in matrices}) > 1:
        got = ", ".join(f"{matrix.dtype}{list(matrix.shape)}" for matrix in matrices)
        raise ValueError(f"{operation}: matrices side by side must have as many rows and the same dtype, got {got}")
    return matrices[0], matrices[1:], "n" if len(matrices) == 1 else COLUMNS[: len(matrices)]


def _side_by_side(widths: str) -> str:
    """The operands of a rule after the source."""
    return "".join(f", m {width}" for width in widths[1:])


def _whole_rows(first, further, split: Split) -> tuple[jax.Array, ...]:
    """Matrices side by side, with the columns that a mesh splits: those of a shard would not be beside each other."""
    if not further:
        return (first,)
    return tuple(gathered(x, split, "", width) for x, width in zip((first, *further), COLUMNS, strict=False))


def _shape_of(matrices) -> tuple[int, int]:
    return matrices[0].shape[0], sum(matrix.shape[1] for matrix in matrices)


def check_source_and_target(x_dtype: jax.typing.DTypeLike, dtype: jax.typing.DTypeLike) -> None:
    """Raise unless the kernels quantize from the one dtype to the other."""
    fp8_max(dtype)  # says what it must be
    if x_dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"quantize needs float32, bfloat16 or float16, got {x_dtype}; cast first")


def check_orientations(orientations: str) -> None:
    """Raise unless it is one of ORIENTATIONS."""
    if orientations not in ORIENTATIONS:
        raise ValueError(f"orientations must be one of {ORIENTATIONS}, got {orientations!r}")


def wanted(orientations: str, straight, transposed) -> tuple:
    """Those of the two that are wanted."""
    return {"both": (straight, transposed), "straight": (straight,), "transposed": (transposed,)}[orientations]


def matrix_results(
    orientations: str, shape: tuple[int, int], dtype: jax.typing.DTypeLike
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What a kernel returns for a matrix (m, n) and its transpose: NOTHING for the one that is not wanted."""
    straight = NOTHING if orientations == "transposed" else shape
    transposed = NOTHING if orientations == "straight" else shape[::-1]
    return jax.ShapeDtypeStruct(straight, dtype), jax.ShapeDtypeStruct(transposed, dtype)


def fp8_arrays(orientations: str, matrices, scale: jax.Array) -> tuple[Fp8Array | None, Fp8Array | None]:
    """The `wanted` matrices in their places, None in that of the other."""
    straight = None if orientations == "transposed" else Fp8Array(matrices[0], scale)
    return straight, None if orientations == "straight" else Fp8Array(matrices[-1], scale)


def _kernel(dtype, scale_rule, x, array, split: Split):  # (m, n), () or (r,) -> (m, n), (), ()
    call = jax.ffi.ffi_call("jax_fp8_quantize", (jax.ShapeDtypeStruct(x.shape, dtype), SCALAR, SCALAR))
    values, amax, scale = call(x, gathered(array, split, "r"), **scale_rule.attributes())
    return values, pmax(amax, split, "m", "n"), scale


def _reference(dtype, scale_rule, x, array, split: Split):
    scale = scale_rule.scale(array, dtype, split)
    return quantize_reference(x, dtype, scale), pmax(amax_reference(x), split, "m", "n"), scale


def _transpose_kernel(
    dtype, scale_rule, x, array, *further, split: Split
):  # (m, n), () or (r,) -> (m, n), (n, m), (), ()
    x, *further = _whole_rows(x, further, split)
    results = matrix_results("both", _shape_of((x, *further)), dtype)
    call = jax.ffi.ffi_call("jax_fp8_quantize_transpose", (*results, SCALAR, SCALAR))
    values, transposed, amax, scale = call(x, gathered(array, split, "r"), *further, **scale_rule.attributes())
    return values, transposed, pmax(amax, split, "m", "n"), scale


def _transpose_reference(dtype, scale_rule, x, array, *further, split: Split):
    x = jnp.concatenate(_whole_rows(x, further, split), axis=1)
    values, amax, scale = _reference(dtype, scale_rule, x, array, split)
    return values, values.T, amax, scale


def _sums_kernel(
    dtype, scale_rule, x, array, *further, split: Split
):  # (m, n), () or (r,) -> (m, n), (n, m), (), (), (n,)
    x, *further = _whole_rows(x, further, split)
    shape = _shape_of((x, *further))
    results = *matrix_results("both", shape, dtype), SCALAR, SCALAR, *sums_results(shape)
    call = jax.ffi.ffi_call("jax_fp8_quantize_transpose_sums", results)
    values, transposed, amax, scale, sums, _ = call(x, gathered(array, split, "r"), *further, **scale_rule.attributes())
    return values, transposed, pmax(amax, split, "m", "n"), scale, psum(sums, split, "m")


def _sums_reference(dtype, scale_rule, x, array, *further, split: Split):
    quantized = _transpose_reference(dtype, scale_rule, x, array, *further, split=split)
    sums = [column_sums_reference(matrix) for matrix in _whole_rows(x, further, split)]
    return *quantized, psum(jnp.concatenate(sums), split, "m")
