"""FP8 weights times few rows, for text generation:
`d[m, n] = alpha (a * a.scale) · (b * b.scale)ᵀ + bias[n] + c[m, n]`.

With at most 64 rows, reading the weights bounds the time of a product. The kernel (csrc/few_rows_gemm.cu) reads each
weight once, half as many bytes as of bfloat16. Its products are exact, and their sums float32; but on GPUs of compute
capability 9.0, the sum of 128 products of E4M3 has some 13 bits, as in cuBLASLt's GEMMs. Weights `b` are E4M3 with one
scale, or with one for each square of 128 x 128. Activations `a` are

    E4M3       by weights with one scale       one scale
    E4M3       by weights with SQUARES         a scale for each LINE of 1 x 128, as in kernels/gemm.py
    bfloat16   by either                       no scale: they need no cast, but the kernel widens weights more slowly

On a CPU runs the reference of `matmul`. Meshes are as there: where one splits k, partial products are summed in
float32, and bias and c are added once.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.cast import LINE, SQUARE
from jax_fp8.core.checks import describe, is_array
from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Array, is_fp8
from jax_fp8.kernels.casting import tile_dims
from jax_fp8.kernels.dispatch import Split, dispatch, split_axes
from jax_fp8.kernels.extension import check_target
from jax_fp8.kernels.few_rows import Around
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

TARGET = "jax_fp8_few_rows_gemm"
# The most rows of a product that takes this kernel as it is; cuBLASLt multiplies more. With what is before and after a
# product, it may have more rows (prepared_gemm.py, FewRows.fits).
MOST_ROWS = 16
KERNEL_ROWS = 64  # the most that the kernel multiplies; as in csrc/device/few_rows_gemm_plan.cuh
# Of the dtype of a and the tiles of a and b, how the kernel is called.
SCALINGS: dict[tuple[np.dtype, Tiles], str] = {
    (jnp.dtype(E4M3), (None, None)): "",
    (jnp.dtype(E4M3), (LINE, SQUARE)): "1d2d",
    (jnp.dtype(jnp.bfloat16), (None, None)): "",
    (jnp.dtype(jnp.bfloat16), (None, SQUARE)): "2d",
}


def multiply_few_rows(
    a: Fp8Array | jax.Array,
    b: Fp8Array,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    bias: jax.Array | None = None,
    c: jax.Array | None = None,
    alpha: float = 1.0,
    columns: tuple[int, int] | None = None,
) -> jax.Array:
    """Multiply at most 64 rows `a` (m, k) by the transpose of the FP8 matrix `b` (n, k).

    Args:
      a: E4M3, with one scale or one for each LINE; or a bfloat16 array.
      b: E4M3, with one scale or one for each SQUARE; k and n are multiples of 16.
      dtype: of the result: bfloat16, float16 or float32.
      bias: (n,), added to every row, in bfloat16 where the result is float32, else in its dtype.
      c: (m, n), added to the product, in `dtype`.
      alpha: multiplies the product, float32; a Python number.
      columns: the first and the number of those that are wanted, multiples of 16; None is all. `c` has these columns
        only. With SQUARES, the first is a multiple of 128.

    Returns:
      (m, n) in `dtype`, or with `columns` so many of them.

    Raises:
      ValueError: if an operand is not such a matrix, `bias` or `c` has another shape, or a setting has another value.
    """
    tiles = check_few_rows(a, b, dtype, columns)
    check_addends("multiply_few_rows", a.shape, b.shape, bias, c, alpha, columns)
    dtype = jnp.dtype(dtype)
    values, scale = (a.values, a.scale) if isinstance(a, Fp8Array) else (a, jnp.float32(1))
    rows = "n" if columns is None else "p"
    dims = [tile_dims(dims, tile) if tile else "" for dims, tile in zip(("m k", f"{rows} k"), tiles, strict=True)]
    operands, rule = [values, b.values, scale, b.scale], f"m k, {rows} k, {dims[0]}, {dims[1]}"
    if bias is not None:
        bias = bias.astype(jnp.bfloat16 if dtype == jnp.float32 else dtype)
        operands, rule = [*operands, bias], f"{rule}, {rows}"
    if c is not None:
        operands, rule = [*operands, c.astype(dtype)], f"{rule}, m n"
    settings = {"dtype": dtype, "has_bias": bias is not None, "alpha": np.float32(alpha), "columns": columns}
    settings["tiles"] = tiles
    part = PartialResult("n", of="p", size=columns[1]) if columns is not None and tiles == (None, None) else None
    kernel = partial(_kernel, has_c=c is not None, **settings)
    (d,) = dispatch(f"{rule} -> m n", kernel, partial(product_reference, **settings), *operands, part=part)
    return d


def _kernel(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *addends: jax.Array,
    split: Split,
    dtype: np.dtype,
    has_bias: bool,
    has_c: bool,
    alpha: float,
    columns: tuple[int, int] | None,
    tiles: Tiles,
):
    if tiles != (None, None):
        b_scale = scales_as_read(check_tiles(a, b, b_scale, tiles, columns, split), tiles[1])
        a_scale = scales_as_read(a_scale, tiles[0]) if tiles[0] else a_scale
    b, addends, columns = gather_columns(b, addends, has_bias, split, columns)
    how = {"alpha": alpha, "columns": columns, "scaling": SCALINGS[a.dtype, tiles]}
    axes = split_axes(split, "k")
    if axes:  # partial products: sum them in float32, then add once
        how |= {"dtype": jnp.dtype(jnp.float32), "has_bias": False, "has_c": False}
        d = lax.psum(call_few_rows(a, b, a_scale, b_scale, **how), axes)
        return (add_addends(d, addends, has_bias, columns).astype(dtype),)
    how |= {"dtype": dtype, "has_bias": has_bias, "has_c": has_c}
    return (call_few_rows(a, b, a_scale, b_scale, *addends, **how),)


def has_few_rows(m: int) -> bool:
    """Whether products of m rows take this kernel, where it knows their operands."""
    return m <= MOST_ROWS


def is_for_few_rows(m: int, a: np.dtype, b: np.dtype, scaling: str) -> bool:
    """Whether `matmul` takes this kernel for a product of m rows, operands of these dtypes and this scaling."""
    return has_few_rows(m) and a == b == E4M3 and scaling in ("", "1d2d")


def is_for_weights_alone(m: int, a: np.dtype, b: Fp8Array) -> bool:
    """Whether a layer with weights in FP8 and activations of this dtype takes this kernel for a product of m rows."""
    tiles = (None, b.granularity if b.scale.ndim else None)
    return has_few_rows(m) and (jnp.dtype(a), tiles) in SCALINGS and not any(size % 16 for size in b.shape)


def call_few_rows(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *addends: jax.Array,
    dtype: np.dtype,
    has_bias: bool,
    has_c: bool,
    alpha: float,
    columns: tuple[int, int] | None,
    scaling: str,
    c_in_place: bool = False,
    config: int = 0,
    around: Around | None = None,
) -> jax.Array:
    """The custom call, with scales as GEMMs read them. `config` chooses the launch, by the digits that
    csrc/few_rows_gemm.cu explains; 0 is the choice for the shape.
    """
    check_target(TARGET)
    first, n = columns or (0, b.shape[0] // 2 if around and around.gated else b.shape[0])
    operands = (a, b, a_scale, b_scale, *addends)
    place_of_c = 4 + has_bias  # before the params of a norm
    casts = around is not None and around.cast is not None
    rows = [jax.ShapeDtypeStruct(a.shape, E4M3)] if casts else []  # where a kernel of its own may cast them to
    call = jax.ffi.ffi_call(
        TARGET,
        [jax.ShapeDtypeStruct((a.shape[0], n), dtype), *rows],
        input_output_aliases={place_of_c: 0} if has_c and c_in_place else None,
    )
    return call(
        *operands,
        has_bias=has_bias,
        has_c=has_c,
        alpha=np.float32(alpha),
        first_column=np.int64(first),
        scaling=scaling,
        config=np.int32(config),
        norm=around.norm if around else "",
        epsilon=np.float32(around.epsilon if around else 0),
        casts=casts,
        a_row=np.int32(around.cast.row if around and around.cast else 0),
        activation=around.activation if around else "",
        second_part=np.int64(around.part_starts[0] if around else 0),
        third_part=np.int64(around.part_starts[1] if around else 0),
        casts_d=False,
        d_row=np.int32(0),
    )[0]


def check_few_rows(
    a: Fp8Array | jax.Array, b: Fp8Array, dtype: jax.typing.DTypeLike, columns: tuple[int, int] | None
) -> Tiles:
    """The tiles of a and b."""
    operation = "multiply_few_rows"
    if not (is_fp8(a) and a.dtype == E4M3) and not (is_array(a) and a.dtype == jnp.bfloat16):
        raise ValueError(
            f"{operation} needs an E4M3 Fp8Array or a bfloat16 array, got {describe(a)} for a; cast it, or use matmul"
        )
    if not is_fp8(b) or b.dtype != E4M3:
        raise ValueError(f"{operation} needs an E4M3 Fp8Array, got {describe(b)} for b; pass fp8.quantize(x, E4M3, s)")
    shapes = f"got a {a.shape} and b {b.shape}"
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"{operation} needs a (m, k) and b (n, k), both contiguous along k, {shapes}")
    if a.shape[1] % 16 or b.shape[0] % 16 or a.shape[1] == 0:
        raise ValueError(f"{operation} needs k and n to be multiples of 16, and k not 0, {shapes}; pad the input")
    if a.shape[0] > KERNEL_ROWS:
        raise ValueError(f"{operation} needs at most {KERNEL_ROWS} rows, {shapes}; use matmul")
    of_a = a.granularity if isinstance(a, Fp8Array) and a.scale.ndim > 0 else None
    of_b = b.granularity if b.scale.ndim > 0 else None
    tiles = next((tiles for of_dtype, tiles in SCALINGS if of_dtype == a.dtype and tiles == (of_a, of_b)), None)
    if tiles is None:
        raise ValueError(
            f"{operation} needs one scale a tensor, SQUARES of 128 x 128 of b, or with them LINES of 1 x 128 of an FP8 "
            f"a, got tiles {of_a} of a {a.dtype} and {of_b} of b; use matmul"
        )
    if not any(dtype == result for result in RESULT_DTYPES):
        raise ValueError(f"{operation} writes bfloat16, float16 or float32, got {dtype=}; pick one and cast after")
    check_columns(b.shape[0], columns)
    if columns is not None and of_b is not None and columns[0] % SQUARE[0]:
        raise ValueError(
            f"{operation} needs the first of columns to be a multiple of {SQUARE[0]} where b has a scale for each "
            f"square, got {columns}; ask for columns from there on"
        )
    return tiles
