"""Quantize a matrix as it is: in one orientation or both, with the sums of its columns,
and several side by side as one.

A tensor that feeds two GEMMs is needed in two orientations: `quantize_transpose` writes both from one read of `x`, and
`quantize_transpose_sums` the sums of its columns as well, the gradient of a bias. Both take matrices side by side too,
a tuple of (m, n_i), and make of them what they would of the one matrix (m, n), which is never put together.

    x, source ─find the scale─ cast, measure→ values, amax, scale        (kernels/casting.py)

Subnormal float32 inputs (below 2**-126 in size) count on the GPU; XLA's CPU compiler flushes them to zero.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp

from jax_fp8.core.cast import Cast
from jax_fp8.core.checks import describe, is_array
from jax_fp8.core.formats import fp8_max
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.scale import check_scale
from jax_fp8.kernels.amax import as_matrix
from jax_fp8.kernels.casting import SCALAR, PairResults, attributes, check_cast, has_kernel, source_dims
from jax_fp8.kernels.dispatch import Split, dispatch, gathered, psum

ROWS_PER_PARTIAL_SUM = 128  # as in csrc/column_sums.h

Matrices = jax.Array | tuple[jax.Array, ...]  # (m, n), or (m, n_i) side by side
MAX_MATRICES = 3  # queries, keys and values; as in csrc/quantize.h
COLUMNS = "abc"  # their letters in a rule


def quantize(x: jax.Array, dtype: jax.typing.DTypeLike, scale: jax.Array) -> Fp8Array:
    """Cast an array to FP8 with a given scale; values beyond the largest FP8 number saturate.

    Args:
      x: float32, bfloat16 or float16, of any shape.
      dtype: E4M3 or E5M2.
      scale: float32 scalar, positive; `x ≈ values * scale`.

    Returns:
      An `Fp8Array` of the shape of `x`.

    Raises:
      ValueError: if `x` is not such an array, `dtype` is not an FP8 dtype, or `scale` is not a scalar from 2**-126 to
        2**126. A traced scale is not checked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> x = fp8.quantize(jnp.array([1.0, 3.0, 1000.0]), fp8.E4M3, jnp.float32(2))
      >>> x.values.astype(jnp.float32)
      Array([  0.5,   1.5, 448. ], dtype=float32)
    """
    if not is_array(x):
        raise ValueError(f"quantize needs an array, got {describe(x)}; pass jnp.asarray(x)")
    fp8_max(dtype)  # says what it must be
    check_scale(scale)
    return quantize_rowwise(x, Cast.with_scale(dtype, scale)).rowwise


def quantize_rowwise(x: jax.Array, cast: Cast) -> Fp8Pair:
    """Cast an array of any shape, by tile a matrix, in the orientation it has."""
    cast = check_cast(cast, x.dtype)
    by_tile = cast.rule.tile is not None
    if by_tile and x.ndim != 2:
        raise ValueError(f"scales by tile need a matrix, got shape {x.shape}; flatten the leading dims")
    results = PairResults(cast.rule, "rowwise")
    rule = f"m n, {source_dims(cast)} -> {results.dims('m n', '')}"
    kernel = partial(_tile_kernel if by_tile else _kernel, results) if has_kernel(cast.rule) else None
    values, *others = dispatch(rule, kernel, partial(_reference, results), as_matrix(x), cast.source)
    return results.pair([values.reshape(x.shape), *others])


def quantize_transpose(x: Matrices, cast: Cast) -> Fp8Pair:
    """Cast a matrix (m, n) in both orientations."""
    cast, matrices, operands = _check_matrices("quantize_transpose", x, cast)
    results = PairResults(cast.rule)
    by_tile = cast.rule.tile is not None
    kernel = partial(_tile_kernel if by_tile else _transpose_kernel, results) if has_kernel(cast.rule) else None
    rule = f"{operands} -> {results.dims('m n', 'n m')}"
    first, *further = matrices
    return results.pair(dispatch(rule, kernel, partial(_reference, results), first, cast.source, *further))


def quantize_transpose_sums(x: Matrices, cast: Cast) -> tuple[Fp8Pair, jax.Array]:
    """`quantize_transpose` of a matrix (m, n), and the sums of its columns in float32, (n,)."""
    cast, matrices, operands = _check_matrices("quantize_transpose_sums", x, cast)
    results = PairResults(cast.rule)
    kernel = partial(_sums_kernel, results) if has_kernel(cast.rule) else None
    rule = f"{operands} -> {results.dims('m n', 'n m')}, n"
    first, *further = matrices
    *arrays, sums = dispatch(rule, kernel, partial(_sums_reference, results), first, cast.source, *further)
    return results.pair(arrays), sums


def column_sums_reference(x: jax.Array) -> jax.Array:
    """The sums of the columns of (m, n) in float32, (n,)."""
    return jnp.sum(x, axis=0, dtype=jnp.float32)


def sums_results(shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What a kernel that sums the columns of a matrix returns:
    the sums, and before them those of every 128 rows, which it adds up.
    """
    m, n = shape
    return jax.ShapeDtypeStruct((n,), jnp.float32), jax.ShapeDtypeStruct(
        (-(-m // ROWS_PER_PARTIAL_SUM), n), jnp.float32
    )


def as_tuple(x: Matrices) -> tuple[jax.Array, ...]:
    """Matrices side by side, of one matrix too."""
    return x if isinstance(x, tuple) else (x,)


def _check_matrices(operation: str, x: Matrices, cast: Cast) -> tuple[Cast, tuple[jax.Array, ...], str]:
    """The cast, the matrices, and the operands of a rule: the first matrix, the source, the others.

    Of one matrix a mesh may split the columns, "n".
    """
    matrices = as_tuple(x)
    if not 1 <= len(matrices) <= MAX_MATRICES:
        raise ValueError(f"{operation} takes 1 to {MAX_MATRICES} matrices side by side, got {len(matrices)}")
    for matrix in matrices:
        cast = check_cast(cast, matrix.dtype)
        if matrix.ndim != 2:
            raise ValueError(f"{operation} needs a matrix, got shape {matrix.shape}; flatten the leading dims")
    if len({(matrix.shape[0], matrix.dtype) for matrix in matrices}) > 1:
        got = ", ".join(f"{matrix.dtype}{list(matrix.shape)}" for matrix in matrices)
        raise ValueError(f"{operation}: matrices side by side must have as many rows and the same dtype, got {got}")
    first, *others = "n" if len(matrices) == 1 else COLUMNS[: len(matrices)]
    return cast, matrices, ", ".join([f"m {first}", source_dims(cast), *(f"m {other}" for other in others)])


def _side_by_side(matrices: Sequence[jax.Array], split: Split) -> jax.Array:
    """One matrix of all columns, of shards too: several side by side are gathered,
    for their shards' columns are not beside each other.
    """
    if len(matrices) == 1:
        return matrices[0]
    return jnp.concatenate([gathered(x, split, "", name) for x, name in zip(matrices, COLUMNS, strict=False)], axis=1)


def _whole_columns(array: jax.Array, matrices: Sequence[jax.Array], split: Split, dim: int) -> jax.Array:
    """What was made of shards of matrices side by side, with all columns of the first matrix first,
    then those of the second.
    """
    if len(matrices) == 1 or not any(split.get(name) for name in COLUMNS):
        return array
    ends = list(accumulate(x.shape[1] for x in matrices))[:-1]
    pieces = zip(jnp.split(array, ends, axis=dim), COLUMNS, strict=False)
    leading = [""] * dim
    return jnp.concatenate([gathered(piece, split, *leading, name) for piece, name in pieces], axis=dim)


def _kernel(
    results: PairResults, x: jax.Array, source: jax.Array, split: Split
):  # (m, n), () or (r,) -> (m, n), (), ()
    call = jax.ffi.ffi_call("jax_fp8_quantize", (jax.ShapeDtypeStruct(x.shape, results.rule.dtype), SCALAR, SCALAR))
    values, amax, scale = call(x, gathered(source, split, "r"), **attributes(results.rule))
    return results.from_kernel((values, None, amax, scale), split, "m", "n")


def _transpose_kernel(results: PairResults, first: jax.Array, source: jax.Array, *further: jax.Array, split: Split):
    matrices = first, *further
    return _cast_kernel("jax_fp8_quantize_transpose", results, (), matrices, source, split)


def _tile_kernel(results: PairResults, first: jax.Array, source: jax.Array, *further: jax.Array, split: Split):
    matrices, split = _as_tiles_are(results, (first, *further), split)
    return _cast_kernel("jax_fp8_quantize_by_tile", results, (), matrices, source, split)


def _sums_kernel(results: PairResults, first: jax.Array, source: jax.Array, *further: jax.Array, split: Split):
    matrices = first, *further
    matrices, split = _as_tiles_are(results, matrices, split)
    extra = sums_results(_shape_of(matrices))
    name = "transpose" if results.rule.tile is None else "by_tile"
    *pair, sums, _ = _cast_kernel(f"jax_fp8_quantize_{name}_sums", results, extra, matrices, source, split)
    return *pair, psum(_whole_columns(sums, matrices, split, 0), split, "m")


def _cast_kernel(
    target: str,
    results: PairResults,
    extra: tuple[jax.ShapeDtypeStruct, ...],
    matrices: tuple[jax.Array, ...],
    source: jax.Array,
    split: Split,
) -> tuple[jax.Array, ...]:
    """The pair's list, and the extra results of the target."""
    shapes = results.shapes(_shape_of(matrices))
    call = jax.ffi.ffi_call(target, (*shapes, *extra))
    operands = results.operands(matrices[0], gathered(source, split, "r"))
    found = call(*operands, *matrices[1:], **attributes(results.rule))
    (values, values_t, *scales), others = found[: len(shapes)], found[len(shapes) :]
    values, values_t = (_whole_columns(array, matrices, split, dim) for array, dim in ((values, 1), (values_t, 0)))
    dims = ("m", "n", *COLUMNS) if results.rule.tile is None else ("m", "n")
    return *results.from_kernel((values, values_t, *scales), split, *dims), *others


def _as_tiles_are(
    results: PairResults, matrices: tuple[jax.Array, ...], split: Split
) -> tuple[tuple[jax.Array, ...], Split]:
    """By tile, matrices side by side with all of their columns, for tiles run along the whole; and what still splits
    them.
    """
    if results.rule.tile is None or len(matrices) == 1:
        return matrices, split
    whole = tuple(gathered(x, split, "", name) for x, name in zip(matrices, COLUMNS, strict=False))
    return whole, {dim: axes for dim, axes in split.items() if dim not in COLUMNS}


def _shape_of(matrices: tuple[jax.Array, ...]) -> tuple[int, int]:
    return matrices[0].shape[0], sum(matrix.shape[1] for matrix in matrices)


def _reference(results: PairResults, first: jax.Array, source: jax.Array, *further: jax.Array, split: Split):
    return results.from_reference(_side_by_side((first, *further), split), source, split, "m", "n")


def _sums_reference(results: PairResults, first: jax.Array, source: jax.Array, *further: jax.Array, split: Split):
    x = _side_by_side((first, *further), split)
    return *results.from_reference(x, source, split, "m", "n"), psum(column_sums_reference(x), split, "m")
