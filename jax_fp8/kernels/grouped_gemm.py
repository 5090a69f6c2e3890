"""FP8 products of groups of rows, each group with a matrix of its own: the GEMMs of a mixture of experts.

    grouped_matmul            d[r, n] = (a[r, k] * a.scale) · (b[e, n, k] * b.scale)ᵀ            the rows r of group e
    grouped_weight_gradient   d[e, m, n] = Σ (a[m, r] * a.scale) · (b[n, r] * b.scale)ᵀ     over the rows r of group e;
                              times alpha, plus c[e, m, n]

Group e has the rows from `starts[e]` to `starts[e + 1]`, a number that only the device knows; the most that all groups
have together is a shape. Every group begins at a multiple of 128 and is padded with zeros. So a block of 128 rows
belongs to one group: a kernel's tile multiplies by one matrix, and no two groups share a tile of scales. Rows after the
last group are zeros in the result, whatever `a` has there.

Both operands are contiguous along the contracting dim, as in kernels/gemm.py. All matrices of `b` have one scale, or
one for each square of each. The references multiply all rows once for each group, which is slow.

Where a mesh splits the rows, each device has groups of its own: `starts` has those of all devices, one after the other,
and is split by the same axes. Gradients are summed over the devices. All other splits are gathered.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.cast import LINE, SQUARE
from jax_fp8.core.checks import describe, is_array
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Array, is_fp8, spread
from jax_fp8.kernels.casting import check_whole_tiles, tile_dims
from jax_fp8.kernels.dispatch import Split, dispatch, gathered, psum
from jax_fp8.kernels.explicit import parse_rule, shards_of
from jax_fp8.kernels.extension import check_target
from jax_fp8.kernels.gemm import REFERENCE_SCOPE, RESULT_DTYPES, scales_as_read
from jax_fp8.kernels.vma import vary, varying_axes

TARGETS = TARGET, GRADIENT_TARGET = "jax_fp8_grouped_gemm", "jax_fp8_grouped_gemm_weight_gradient"
GROUP_ROWS = 128  # every group has a multiple of these
SQUARE_OF_EACH = (1, *SQUARE)  # of matrices (experts, n, k)
Tiles = tuple[tuple[int, ...] | None, tuple[int, ...] | None]  # of a and b
Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]  # a, b, their scales, starts
NO_TILES: Tiles = (None, None)
# Of the tiles of a and b, how kernels call them. Others have a reference only.
SCALINGS = {NO_TILES: "", (LINE, SQUARE_OF_EACH): "1d2d"}
GRADIENT_SCALINGS = {NO_TILES: "", (LINE, SQUARE): "1d2d"}


def grouped_matmul(
    a: Fp8Array,
    b: Fp8Array,
    starts: jax.Array,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    side_by_side: bool = False,
) -> jax.Array:
    """Multiply each group of rows of `a` (rows, k) by the transpose of its matrix of `b` (experts, n, k).

    Args:
      a, b: FP8; E5M2 by E5M2 does not exist on the hardware and is refused. By tile, `a` has lines of 1 x 128 and `b`
        squares of 1 x 128 x 128.
      starts: i32[experts + 1], the first row of each group, and where the last one ends: multiples of 128.
      dtype: of the result: bfloat16, float16 or float32.
      side_by_side: the kernel reads the matrices of `b` from memory in which they lie side by side, as (n, experts, k).
        The numbers are the same.

    Returns:
      (rows, n) in `dtype`; zeros behind the last group.
    """
    _check_operands("grouped_matmul", a, b, dtype, "a (rows, k) and b (experts, n, k)", (2, 3))
    _check_sizes("grouped_matmul", a, b, {"k": a.shape[1], "n": b.shape[1]}, a.shape[0])
    _check_starts("grouped_matmul", starts, a.values, 0, b.shape[0])
    tiles = _tiles(a, b)
    rule = f"m k, e n k, {_scale_dims(a, 'm k')}, {_scale_dims(b, 'e n k')}, s -> m n"
    settings = {"dtype": jnp.dtype(dtype), "tiles": tiles, "side_by_side": side_by_side}
    kernel, reference = (partial(_matmul, rule, of, **settings) for of in (_matmul_kernel, _matmul_reference))
    operands = a.values, b.values, a.scale, b.scale, starts
    return dispatch(rule, kernel if tiles in SCALINGS else None, reference, *operands)[0]


def grouped_weight_gradient(
    a: Fp8Array,
    b: Fp8Array,
    starts: jax.Array,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    c: jax.Array | None = None,
    alpha: float = 1.0,
) -> jax.Array:
    """For each group, multiply its columns of `a` (m, rows) by the transpose of those of `b` (n, rows).

    Args:
      a, b: as of `grouped_matmul`; by tile, `a` has lines of 1 x 128 and `b` squares of 128 x 128.
      starts: i32[experts + 1], as there.
      dtype: of the result: bfloat16, float16 or float32.
      c: (experts, m, n) in `dtype`, which is added. The result is written over it where it is donated or dead.
      alpha: by which the product is multiplied.

    Returns:
      (experts, m, n) in `dtype`; for a group without rows zeros, or `c`.
    """
    _check_operands("grouped_weight_gradient", a, b, dtype, "a (m, rows) and b (n, rows)", (2, 2))
    _check_sizes("grouped_weight_gradient", a, b, {"m": a.shape[0], "n": b.shape[0]}, a.shape[1])
    experts = starts.size // shards_of(starts, 0) - 1 if is_array(starts) else 0
    _check_starts("grouped_weight_gradient", starts, a.values, 1, experts)
    shape = (experts, a.shape[0], b.shape[0])
    if c is not None and (c.shape, c.dtype) != (shape, dtype):
        raise ValueError(f"grouped_weight_gradient needs c {jnp.dtype(dtype)}{shape}, got {c.dtype}{c.shape}; cast it")
    tiles, added = _tiles(a, b), () if c is None else (c,)
    rule = f"m r, n r, {_scale_dims(a, 'm r')}, {_scale_dims(b, 'n r')}, s{', e m n' * len(added)} -> e m n"
    settings = {"dtype": jnp.dtype(dtype), "tiles": tiles, "experts": experts, "alpha": float(alpha)}
    kernel, reference = (partial(_gradient, rule, of, **settings) for of in (_gradient_kernel, _gradient_reference))
    operands = a.values, b.values, a.scale, b.scale, starts, *added
    return dispatch(rule, kernel if tiles in GRADIENT_SCALINGS else None, reference, *operands)[0]


# ---- on shards -------------------------------------------------------------------------------------------------------


def _matmul(
    rule: str,
    product: Callable[..., jax.Array],
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    starts: jax.Array,
    split: Split,
    tiles: Tiles,
    **how: object,
):
    own = _own_groups(split, starts, b.shape[0], "m")
    d = product(_with_whole(rule, split, own, tiles, (a, b, a_scale, b_scale, starts)), tiles, **how)
    return (_part_of_shard(d, split, own, ("m", "n")),)


def _gradient(
    rule: str,
    product: Callable[..., jax.Array],
    a: jax.Array,
    b: jax.Array,
    a_scale: jax.Array,
    b_scale: jax.Array,
    starts: jax.Array,
    *c: jax.Array,
    split: Split,
    dtype: jax.typing.DTypeLike,
    tiles: Tiles,
    experts: int,
    alpha: float,
):
    own = _own_groups(split, starts, experts, "r")
    operands = _with_whole(rule, split, own, tiles, (a, b, a_scale, b_scale, starts))
    c = tuple(gathered(x, split, "e", "m", "n") for x in c)
    if own:  # the sum over devices comes first
        d = psum(product(operands, tiles, jnp.dtype(jnp.float32), alpha), own, "r")
        d = sum(c, d).astype(dtype)
    else:
        d = product(operands, tiles, dtype, alpha, *c)
    return (_part_of_shard(d, split, own, ("e", "m", "n")),)


def _own_groups(split: Split, starts: jax.Array, experts: int, rows: str) -> Split:
    """What splits the rows, where each shard has groups of its own; nothing else stays split."""
    has_own = split.get(rows) and split.get("s") == split[rows] and starts.size == experts + 1
    return {dim: split[dim] for dim in (rows, "s")} if has_own else {}


def _with_whole(rule: str, split: Split, own: Split, tiles: Tiles, operands: Operands) -> Operands:
    """The operands, of which only what is `own` is still split."""
    inputs, _ = parse_rule(rule)
    for x, dims, tile in zip(operands, inputs, tiles, strict=False):
        if tile is not None:
            check_whole_tiles(split, dims, x.shape, tile)
    others = {dim: axes for dim, axes in split.items() if dim not in own}
    a, b, a_scale, b_scale, starts = (gathered(x, others, *dims) for x, dims in zip(operands, inputs, strict=False))
    return a, b, a_scale, b_scale, starts


def _part_of_shard(d: jax.Array, split: Split, own: Split, dims: Sequence[str]) -> jax.Array:
    """This shard's part of a result of which all was made."""
    for position, dim in enumerate(dims):
        if split.get(dim) and dim not in own:
            size = d.shape[position] // lax.axis_size(split[dim])
            d = lax.dynamic_slice_in_dim(d, lax.axis_index(split[dim]) * size, size, position)
    return d


# ---- kernels and references ------------------------------------------------------------------------------------------


def _matmul_kernel(operands: Operands, tiles: Tiles, dtype: jax.typing.DTypeLike, side_by_side: bool):
    a, b, *_ = operands
    result = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), dtype)
    layouts = (None, (1, 0, 2) if side_by_side else None, None, None, None)  # dims from the outermost on
    call = jax.ffi.ffi_call(TARGET, result, input_layouts=layouts)
    return _call(TARGET, partial(call, side_by_side=side_by_side), operands, SCALINGS[tiles], tiles)


def _gradient_kernel(
    operands: Operands, tiles: Tiles, dtype: jax.typing.DTypeLike, alpha: float, *c: jax.Array
) -> jax.Array:
    a, b, *_, starts = operands
    result = jax.ShapeDtypeStruct((starts.size - 1, a.shape[0], b.shape[0]), dtype)
    call = jax.ffi.ffi_call(GRADIENT_TARGET, result, input_output_aliases={len(operands): 0} if c else None)
    scaling = GRADIENT_SCALINGS[tiles]
    return _call(GRADIENT_TARGET, partial(call, alpha=np.float32(alpha)), operands, scaling, tiles, *c)


def _call(
    target: str, call: Callable[..., jax.Array], operands: Operands, scaling: str, tiles: Tiles, *c: jax.Array
) -> jax.Array:
    check_target(target)
    a, b, a_scale, b_scale, starts = operands
    if scaling:
        a_scale, b_scale = scales_as_read(a_scale, tiles[0]), scales_as_read(b_scale, tiles[1])
    return call(a, b, a_scale, b_scale, starts, *c, scaling=scaling)


def _matmul_reference(operands: Operands, tiles: Tiles, dtype: jax.typing.DTypeLike, side_by_side: bool):
    a, b, a_scale, b_scale, starts = operands
    a, b, factor, precision = _numbers(a, b, a_scale, b_scale, tiles)
    row = jnp.arange(a.shape[0])[:, None]

    def add_group(total: jax.Array, group: tuple[jax.Array, ...]):
        matrix, first, end = group
        product = _product(a, matrix, precision)
        return jnp.where((row >= first) & (row < end), product, total), None

    nothing = jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
    total, _ = lax.scan(add_group, vary(nothing, varying_axes(a, b, starts)), (b, starts[:-1], starts[1:]))
    return (total * factor).astype(dtype)


def _gradient_reference(
    operands: Operands, tiles: Tiles, dtype: jax.typing.DTypeLike, alpha: float, *c: jax.Array
) -> jax.Array:
    a, b, a_scale, b_scale, starts = operands
    a, b, factor, precision = _numbers(a, b, a_scale, b_scale, tiles)
    row = jnp.arange(a.shape[1])

    def of_group(_: object, group: tuple[jax.Array, ...]):
        first, end = group
        is_own = (row >= first) & (row < end)
        own, other = (jnp.where(is_own, x, jnp.zeros((), x.dtype)) for x in (a, b))
        return None, _product(own, other, precision)

    _, products = lax.scan(of_group, None, (starts[:-1], starts[1:]))
    return sum(c, products * (factor * np.float32(alpha))).astype(dtype)


def _numbers(a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, tiles: Tiles):
    """What to multiply, by what the product is multiplied, and the precision, as in kernels/gemm.py."""
    if tiles == NO_TILES:
        return a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), a_scale * b_scale, None
    scaled = (
        x.astype(jnp.float32) * spread(scale, x.shape, tile)
        for x, scale, tile in zip((a, b), (a_scale, b_scale), tiles, strict=True)
    )
    return *scaled, np.float32(1), lax.Precision.HIGHEST


def _product(a: jax.Array, b: jax.Array, precision: lax.Precision | None) -> jax.Array:
    with jax.named_scope(REFERENCE_SCOPE):
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision, preferred_element_type=jnp.float32)


# ---- what must hold --------------------------------------------------------------------------------------------------


def _tiles(a: Fp8Array, b: Fp8Array) -> Tiles:
    of_a, of_b = (None if x.scale.ndim == 0 else x.granularity for x in (a, b))
    return of_a, of_b


def _scale_dims(x: Fp8Array, dims: str) -> str:
    return "" if x.scale.ndim == 0 else tile_dims(dims, x.granularity)


def _check_operands(
    operation: str, a: Fp8Array, b: Fp8Array, dtype: jax.typing.DTypeLike, wanted: str, dims: tuple[int, int]
):
    for name, x in (("a", a), ("b", b)):
        if not is_fp8(x) or x.dtype not in (E4M3, E5M2):
            raise ValueError(
                f"{operation} needs Fp8Arrays, got {describe(x)} for {name}; pass fp8.quantize(x, E4M3, scale)"
            )
    if (a.ndim, b.ndim) != dims or a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"{operation} needs {wanted}, both contiguous along the dim that is contracted, got a {a.shape} and "
            f"b {b.shape}; pass the transposed copy"
        )
    if a.dtype == E5M2 and b.dtype == E5M2:
        raise ValueError(
            f"{operation} got two E5M2 operands, which the hardware cannot multiply; quantize one of them to E4M3"
        )
    if not any(dtype == result for result in RESULT_DTYPES):
        raise ValueError(
            f"{operation} writes bfloat16, float16 or float32, got {dtype=}; pick one of these and cast after"
        )


def _check_sizes(operation: str, a: Fp8Array, b: Fp8Array, sizes: Mapping[str, int], rows: int):
    for name, size in sizes.items():
        if size % 16:
            raise ValueError(
                f"{operation} needs {name} to be a multiple of 16, got a {a.shape} and b {b.shape}; "
                "pad the input or use bfloat16 (recipe=None)"
            )
    if rows % GROUP_ROWS:
        raise ValueError(
            f"{operation} needs groups of whole {GROUP_ROWS} rows, got {rows} rows; fill each group up with zeros"
        )


def _check_starts(operation: str, starts: jax.Array, a: jax.Array, dim: int, experts: int):
    """Raise unless these can be the first rows of so many groups; on an Explicit mesh, of each shard's."""
    shards = shards_of(starts, 0) if is_array(starts) else 1
    wanted = (experts + 1) * shards
    if not is_array(starts) or starts.shape != (wanted,) or starts.dtype != jnp.int32 or experts < 1:
        raise ValueError(
            f"{operation} needs starts i32[experts + 1], the first row of each group and where the last one ends, "
            f"got {describe(starts)}{f' for {experts} experts' if experts > 0 else ''}; see ops/expert_rows.py"
        )
    if shards > 1 and shards != shards_of(a, dim):
        raise ValueError(
            f"{operation} needs rows and starts that a mesh splits alike, got {shards_of(a, dim)} parts of the rows "
            f"and {shards} of the starts; place them alike"
        )
