"""What the products of kernels/gemm.py and kernels/few_rows_gemm.py share: the reference, addends and some columns of
a product, scales as kernels read them, and checks.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.cast import LINE, Tile
from jax_fp8.core.checks import check_integer, check_number, describe
from jax_fp8.core.fp8_array import spread
from jax_fp8.kernels.casting import check_whole_tiles
from jax_fp8.kernels.dispatch import Split, gathered, split_axes

REFERENCE_SCOPE = "jax_fp8_gemm_reference"
RESULT_DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))
Tiles = tuple[Tile | None, Tile | None]  # of a and b
SCALES_ALIGNMENT = 4


def product_reference(
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    *addends: jax.Array,
    split: Split,
    dtype: jax.typing.DTypeLike,
    has_bias: bool,
    alpha: float,
    columns: tuple[int, int] | None,
    tiles: Tiles,
):
    b_scale = check_tiles(a, b, b_scale, tiles, columns, split)
    b, addends, columns = gather_columns(b, addends, has_bias, split, columns)
    if a_scale.ndim == b_scale.ndim == 0:
        # Every FP8 value is a bfloat16 value, and a product of two is exact in float32.
        a, b, factor, precision = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), alpha * (a_scale * b_scale), None
    else:
        a = a.astype(jnp.float32) * spread(a_scale, a.shape, tiles[0])
        b = b.astype(jnp.float32) * spread(b_scale, b.shape, tiles[1])
        factor, precision = alpha, lax.Precision.HIGHEST
    if columns is not None:
        b = lax.slice_in_dim(b, columns[0], sum(columns))
    with jax.named_scope(REFERENCE_SCOPE):
        contract = (((1,), (1,)), ((), ()))
        product = lax.dot_general(a, b, contract, precision, preferred_element_type=jnp.float32)
    axes = split_axes(split, "k")
    product = lax.psum(product, axes) if axes else product
    return (add_addends(product * factor, addends, has_bias, columns).astype(dtype),)


def gather_columns(
    b: jax.Array, addends: Sequence[jax.Array], has_bias: bool, split: Split, columns: tuple[int, int] | None
):
    """Rows of b and elements of the bias from all shards; of those, where `columns` are to be made in parts,
    this shard's, which are all of its columns then.
    """
    b, *bias = (gathered(array, split, "p") for array in (b, *addends[:has_bias]))
    if columns is not None and split.get("n"):
        first, count = columns[0], columns[1] // lax.axis_size(split["n"])
        first = first + lax.axis_index(split["n"]) * count
        b, *bias = (lax.dynamic_slice_in_dim(array, first, count) for array in (b, *bias))
        columns = None
    return b, (*bias, *addends[has_bias:]), columns


def add_addends(product: jax.Array, addends: Sequence[jax.Array], has_bias: bool, columns: tuple[int, int] | None):
    if has_bias and columns is not None:
        addends = (addends[0][columns[0] : sum(columns)], *addends[1:])
    for addend in addends:
        product = product + lax.broadcast_to_rank(addend.astype(jnp.float32), product.ndim)
    return product


def check_tiles(
    a: jax.Array, b: jax.Array, b_scale: jax.Array, tiles: Tiles, columns: tuple[int, int] | None, split: Split
):
    """Raise where a mesh splits a tile; the scales of all rows of b, if some of its columns are wanted."""
    b_dims = "n k" if columns is None else "p k"
    for x, dims, tile in ((a, "m k", tiles[0]), (b, b_dims, tiles[1])):
        if tile is not None:
            check_whole_tiles(split, dims.split(), x.shape, tile)
    return b_scale if tiles[1] is None or columns is None else gathered(b_scale, split, "p")


def scales_as_read(scale: jax.Array, tile: tuple[int, ...] | None) -> jax.Array:
    """Scales in the order that GEMMs want, and as many: of lines the transpose; the last dim filled up."""
    scale = scale.T if tile == LINE else scale
    missing = -scale.shape[-1] % SCALES_ALIGNMENT
    return jnp.pad(scale, [*[(0, 0)] * (scale.ndim - 1), (0, missing)], constant_values=1)


def check_columns(all_columns: int, columns: tuple[int, int] | None):
    if columns is None:
        return
    if not isinstance(columns, tuple) or len(columns) != 2:
        raise ValueError(f"columns must be the first and their number, got {columns!r}; pass a tuple of two integers")
    for name, number in zip(("the first of columns", "the number of columns"), columns, strict=True):
        check_integer(name, number, least=0)
    first, count = columns
    if first < 0 or count < 0 or first % 16 or count % 16 or first + count > all_columns:
        raise ValueError(
            f"columns must be the first and the number of some of the {all_columns}, multiples of 16, got {columns}"
        )


def check_addends(
    operation: str,
    a_shape: tuple[int, ...],
    b_shape: tuple[int, ...],
    bias: jax.Array | None,
    c: jax.Array | None,
    alpha: float,
    columns: tuple[int, int] | None,
):
    m, n = a_shape[0], b_shape[0]
    for name, array, shape in (("bias", bias, (n,)), ("c", c, (m, columns[1] if columns else n))):
        if array is not None and getattr(array, "shape", None) != shape:
            raise ValueError(
                f"{operation} needs {name} of shape {shape}, got {describe(array)}; reshape or broadcast it"
            )
    check_number("alpha", alpha, "", lambda alpha: True, "multiply the result by what is traced")
