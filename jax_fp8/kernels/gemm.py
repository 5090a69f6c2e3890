"""FP8 matrix product: `d[m, n] = alpha (a * a.scale) · (b * b.scale)ᵀ + bias[n] + c[m, n]`,
both operands contiguous along k.

cuBLASLt on Hopper has FP8 GEMMs in this layout only, so callers keep each tensor in the orientation its GEMM needs.
With `accumulation="fast"` the tensor core adds in its own, shorter accumulator; with "split" partial sums are promoted
to float32 on the way. The reference multiplies the FP8 values exactly and accumulates in float32. `columns` asks for
some columns of the product as an array of their own: the kernel starts at a later row of b, without a copy.

By tile, cuBLASLt multiplies LINES by SQUARES, SQUARES by LINES and LINES by LINES; the sum of each 128 products is
scaled and added in float32, whatever `accumulation` says. It reads the scales of lines with neighbouring rows
contiguous, f32[ceil(k / 128), m], and those of squares with neighbouring tiles of k contiguous, f32[ceil(n / 128),
ceil(k / 128)]; the last dim of both must be a multiple of four. For some numbers of rows in lines, such as 18, it has
no algorithm, so rows are padded with zeros to a multiple of 16, which a training step never needs.

Large products of LINES by SQUARES, in E4M3, run on a kernel of our own on a GPU of compute capability 9.0
(csrc/grouped_gemm.cu), the first of their candidates, before cuBLASLt's. `kernels/tuned_gemms.py` says which candidate
runs. Products of few rows may run on the kernel of kernels/few_rows_gemm.py, which has no candidates.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.cast import LINE, SQUARE
from jax_fp8.core.checks import describe
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Array, is_fp8
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.casting import tile_dims
from jax_fp8.kernels.dispatch import Split, dispatch, split_axes
from jax_fp8.kernels.few_rows_gemm import call_few_rows, is_for_few_rows
from jax_fp8.kernels.gemm_parts import REFERENCE_SCOPE as REFERENCE_SCOPE
from jax_fp8.kernels.gemm_parts import (
    RESULT_DTYPES,
    Tiles,
    add_addends,
    check_addends,
    check_columns,
    check_tiles,
    gather_columns,
    product_reference,
    scales_as_read,
)
from jax_fp8.kernels.partial_results import PartialResult
from jax_fp8.kernels.tuned_gemms import GemmProblem, Ranks, ranks_in_use

TARGET = "jax_fp8_gemm"
# Of the tiles of a and b, None for one scale a tensor: how a problem is called.
SCALINGS: dict[Tiles, str] = {
    (None, None): "",
    (LINE, SQUARE): "1d2d",
    (SQUARE, LINE): "2d1d",
    (LINE, LINE): "1d1d",
}
ROWS_IN_LINES = 16
WORKSPACE_BYTES = 32 * 2**20  # what NVIDIA recommends for Hopper; as in csrc/gemm_plan.h


def matmul(
    a: Fp8Array,
    b: Fp8Array,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    bias: jax.Array | None = None,
    c: jax.Array | None = None,
    c_in_place: bool = True,
    alpha: float = 1.0,
    accumulation: str = "fast",
    columns: tuple[int, int] | None = None,
    columns_over: tuple[str, ...] = (),
) -> jax.Array:
    """Multiply the FP8 matrix `a` (m, k) by the transpose of the FP8 matrix `b` (n, k).

    Args:
      a, b: (m, k) and (n, k), one of them or both E4M3, with k and n multiples of 16.
      dtype: of the result: bfloat16, float16 or float32.
      bias: (n,), added to every row.
      c: (m, n), added to the product: an accumulator or a residual.
      c_in_place: write the result over `c`, right for one that is donated or dead; else it is copied first.
        False for one that is used again.
      alpha: multiplies the product, float32; a Python number.
      accumulation: "fast" or "split"; of no matter by tile.
      columns: the first and the number of those that are wanted, multiples of 16; None is all. `c` has these columns
        only. Where a mesh splits the rows of `b`, they are gathered.
      columns_over: with `columns`, the axes of an Explicit mesh that split them in the result.

    Returns:
      (m, n) in `dtype`, or with `columns` so many of them.

    Raises:
      ValueError: if an operand is not such a matrix, `bias` or `c` has another shape, or a setting has another value.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> one = fp8.quantize(jnp.ones((16, 32)), fp8.E4M3, jnp.float32(1))
      >>> y = fp8.matmul(one, one, dtype=jnp.float32)
      >>> y.shape, y[0, 0].item()
      ((16, 16), 32.0)
    """
    dtype = _check(a, b, dtype, accumulation, columns)
    check_addends("matmul", a.shape, b.shape, bias, c, alpha, columns)
    all_columns = "n" if columns is None else "p"
    matrices = ((a, "m k"), (b, f"{all_columns} k"))
    scales = ["" if x.scale.ndim == 0 else tile_dims(dims, x.granularity) for x, dims in matrices]
    operands, rule = [a.values, b.values, a.scale, b.scale], f"m k, {all_columns} k, {', '.join(scales)}"
    if bias is not None:
        bias = bias.astype(jnp.bfloat16 if dtype == jnp.float32 else dtype)
        operands, rule = [*operands, bias], f"{rule}, {all_columns}"
    if c is not None:
        operands, rule = [*operands, c.astype(dtype)], f"{rule}, m n"
    tiles = tuple(None if x.scale.ndim == 0 else x.granularity for x in (a, b))
    settings = {"dtype": dtype, "has_bias": bias is not None, "alpha": np.float32(alpha), "columns": columns}
    settings["tiles"] = tiles
    # Ranks are read here: where the compiler partitions, it asks for kernels after tracing, when the context is over.
    how = {"has_c": c is not None, "accumulation": accumulation, "c_in_place": c_in_place, "ranks": ranks_in_use()}
    kernel = partial(_kernel, **settings, **how) if tiles in SCALINGS else None
    # Of some columns each device makes those that it is to have, but by tile; of all, those whose rows of b it has.
    no_tiles = tiles == (None, None)
    part = PartialResult("n", of="p", size=columns[1], axes=columns_over) if columns is not None and no_tiles else None
    (d,) = dispatch(f"{rule} -> m n", kernel, partial(product_reference, **settings), *operands, part=part)
    return d


def _kernel(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *addends: jax.Array,
    split: Split,
    dtype: jax.typing.DTypeLike,
    has_bias: bool,
    has_c: bool,
    columns: tuple[int, int] | None,
    tiles: Tiles,
    **how: PyTree,
):
    if tiles != (None, None):
        b_scale = check_tiles(a, b, b_scale, tiles, columns, split)
        b_scale, tiles = _scales_of_columns(b_scale, tiles, columns)
        a_scale, b_scale = (scales_as_read(*of) for of in zip((a_scale, b_scale), tiles, strict=True))
    b, addends, columns = gather_columns(b, addends, has_bias, split, columns)
    how |= {"columns": columns, "scaling": SCALINGS[tiles]}
    axes = split_axes(split, "k")
    if axes:  # partial products: sum them in float32, then add once
        d = _call(a, b, a_scale, b_scale, dtype=jnp.dtype(jnp.float32), has_bias=False, has_c=False, **how)
        return (add_addends(lax.psum(d, axes), addends, has_bias, columns).astype(dtype),)
    return (_call(a, b, a_scale, b_scale, *addends, dtype=dtype, has_bias=has_bias, has_c=has_c, **how),)


def _call(
    a: jax.Array,
    b: jax.Array,
    *others: jax.Array,
    dtype: PyTree,
    has_bias: bool,
    has_c: bool,
    alpha: float,
    accumulation: str,
    c_in_place: bool,
    ranks: Ranks,
    columns: tuple[int, int] | None,
    scaling: str,
) -> jax.Array:
    (m, k), (first, n) = a.shape, columns or (0, b.shape[0])
    added = scaling or accumulation
    if is_for_few_rows(m, a.dtype, b.dtype, scaling):
        how = {"has_bias": has_bias, "has_c": has_c, "c_in_place": c_in_place, "alpha": alpha, "columns": columns}
        return call_few_rows(a, b, *others, dtype=dtype, scaling=scaling, **how)
    problem = GemmProblem(m, n, k, a.dtype.name, b.dtype.name, dtype.name, has_bias, has_c, added)
    if missing := -m % ROWS_IN_LINES if scaling.startswith("1d") else 0:
        a, others = _with_more_rows(missing, a, *others, has_c=has_c)
    operands = (a, b, *others)
    call = jax.ffi.ffi_call(
        TARGET,
        (jax.ShapeDtypeStruct((a.shape[0], n), dtype), jax.ShapeDtypeStruct((WORKSPACE_BYTES,), jnp.uint8)),
        input_output_aliases={len(operands) - 1: 0} if has_c and c_in_place else None,
    )
    d, _ = call(
        *operands,
        has_bias=has_bias,
        has_c=has_c,
        fast_accumulation=added == "fast",
        scaling=scaling,
        alpha=alpha,
        first_column=np.int64(first),
        candidate=np.int32(ranks.get(problem, 0)),
    )
    return d[:m]


def _with_more_rows(
    missing: int, a: jax.Array, a_scale: jax.Array, *others: jax.Array, has_c: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Operands with more rows of zeros in a and c; the scales of lines are filled up already, to a multiple of 4."""
    rows = a.shape[0] + missing
    a_scale = jnp.pad(a_scale, [(0, 0), (0, rows - a_scale.shape[1])], constant_values=1)
    if has_c:
        others = *others[:-1], jnp.pad(others[-1], [(0, missing), (0, 0)])
    return jnp.pad(a, [(0, missing), (0, 0)]), (a_scale, *others)


def _scales_of_columns(b_scale: jax.Array, tiles: Tiles, columns: tuple[int, int] | None) -> tuple[jax.Array, tuple]:
    """The scales with which some rows of b are multiplied, and the tiles.

    The kernel itself finds its squares among those of all rows; a slice would be a command that a CUDA graph has to
    update in every step. Where squares would be cut, their scales become those of lines.
    """
    if columns is None or (tiles[1] == SQUARE and columns[0] % SQUARE[0] == 0):
        return b_scale, tiles
    if tiles[1] == SQUARE:
        b_scale, tiles = jnp.repeat(b_scale, SQUARE[0], axis=0), (tiles[0], LINE)
    return b_scale[columns[0] : sum(columns)], tiles


def _check(
    a: Fp8Array, b: Fp8Array, dtype: jax.typing.DTypeLike, accumulation: str, columns: tuple[int, int] | None
) -> np.dtype:
    """The result's dtype."""
    for name, x in (("a", a), ("b", b)):
        if not is_fp8(x) or x.dtype not in (E4M3, E5M2):
            raise ValueError(f"matmul needs Fp8Arrays, got {describe(x)} for {name}; pass fp8.quantize(x, E4M3, scale)")
    shapes = f"got a {a.shape} and b {b.shape}"
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"matmul needs a (m, k) and b (n, k), both contiguous along k, {shapes}; pass the transposed copy"
        )
    if a.shape[1] % 16 or b.shape[0] % 16:
        raise ValueError(
            f"matmul needs k and n to be multiples of 16, {shapes}; pad the input or use bfloat16 (recipe=None)"
        )
    if a.dtype == E5M2 and b.dtype == E5M2:
        raise ValueError(
            "matmul got two E5M2 operands, which the hardware cannot multiply; quantize one of them to E4M3"
        )
    if not any(dtype == result for result in RESULT_DTYPES):
        raise ValueError(f"matmul writes bfloat16, float16 or float32, got {dtype=}; pick one of these and cast after")
    if accumulation not in ("fast", "split"):
        raise ValueError(f'accumulation must be "fast" or "split", got {accumulation!r}')
    check_columns(b.shape[0], columns)
    return jnp.dtype(dtype)
