"""Products of few rows with what is around them, in one kernel: norm and cast before, activation or parts after.

    FewRows ─normalize, cast→ a ─product, bias→ d ─activate→ m, n or m, n / 2
                                                └─cut→ m, n_1; m, n_2; m, n_3

Text generation reads one row of each prompt. Each kernel costs some microseconds then, whatever it does, and its GEMMs
wait for memory anyway.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.cast import Cast
from jax_fp8.core.checks import describe
from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.activation_functions import activate, is_gated
from jax_fp8.kernels.casting import tile_dims
from jax_fp8.kernels.dispatch import Split, dispatch, gathered, parse_rule
from jax_fp8.kernels.few_rows import (
    PREPARED_ROWS,
    WARPGROUP_ROWS,
    Around,
    FewRows,
    has_warpgroups,
    is_alone,
    prepare_reference,
    scale_of,
)
from jax_fp8.kernels.few_rows_gemm import KERNEL_ROWS, SCALINGS, call_few_rows, check_few_rows, has_few_rows
from jax_fp8.kernels.gemm import matmul
from jax_fp8.kernels.gemm_parts import Tiles, check_addends, product_reference, scales_as_read
from jax_fp8.kernels.norm import NormParameters

MOST_PARTS = 3


def multiply_prepared(
    a: Fp8Array | jax.Array | FewRows,
    b: Fp8Array,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    bias: jax.Array | None = None,
    c: jax.Array | None = None,
    activation: str | None = None,
    widths: tuple[int, ...] = (),
) -> PyTree:
    """`multiply_few_rows` with what the kernel does before and after.

    Args:
      a: as there; or `FewRows` before norm and cast, that fit.
      b, dtype, bias, c: as there.
      activation: of the product in `dtype`, of `FewRows` alone, without `c`; a gated one takes the gate from the first
        half of the columns.
      widths: two or three numbers of columns, multiples of 16, into which the result is cut, without `c`. The kernel
        writes each part as an array of its own, without a copy.

    Returns:
      (m, n) in `dtype`; with a gated activation (m, n / 2); with `widths` a tuple.

    Raises:
      ValueError: if operands are not such matrices, or a setting has another value.
    """
    tiles = _check(a, b, dtype, bias, c, activation, widths)
    rows = a if isinstance(a, FewRows) else None
    cast, norm = (rows.cast, rows.norm) if rows else (None, None)
    around = Around(
        dtype=jnp.dtype(dtype),
        has_bias=bias is not None,
        has_c=c is not None,
        tiles=tiles,
        norm="" if norm is None else "rmsnorm" if norm.bias is None else "layernorm",
        epsilon=rows.epsilon if rows else 0.0,
        cast=cast and cast.rule,
        activation=activation or "",
        widths=widths,
    )
    values = a.x if isinstance(a, FewRows) else a.values if isinstance(a, Fp8Array) else a
    source = cast.source if cast else a.scale if isinstance(a, Fp8Array) else jnp.float32(1)
    n = "q" if around.gated or widths else "n"  # gathered: what is cut or paired
    of_a = tile_dims("m k", tiles[0]) if tiles[0] else "r" * source.ndim
    operands = [values, b.values, source, b.scale]
    rule = f"m k, {n} k, {of_a}, {tile_dims(f'{n} k', tiles[1]) if tiles[1] else ''}"
    if bias is not None:
        bias = bias.astype(jnp.bfloat16 if around.dtype == jnp.float32 else around.dtype)
        operands, rule = [*operands, bias], f"{rule}, {n}"
    if c is not None:
        operands, rule = [*operands, c.astype(around.dtype)], f"{rule}, m n"
    if norm is not None:
        of_norm = [vector.astype(jnp.float32) for vector in (norm.scale, norm.bias) if vector is not None]
        operands, rule = [*operands, *of_norm], rule + ", p" * len(of_norm)
    results = ", ".join(f"m {dim}" for dim in "xyz"[: len(widths)]) if widths else "m h" if around.gated else "m n"
    rule = f"{rule} -> {results}"
    kernel, reference = (partial(form, rule, around) for form in (_kernel, _reference))
    found = dispatch(rule, kernel, reference, *operands)
    return found if widths else found[0]


def _check(
    a: Fp8Array | jax.Array | FewRows,
    b: Fp8Array,
    dtype: jax.typing.DTypeLike,
    bias: jax.Array | None,
    c: jax.Array | None,
    activation: str | None,
    widths: tuple[int, ...],
) -> Tiles:
    """The tiles of a and b."""
    if isinstance(a, FewRows):
        like: PyTree = jax.ShapeDtypeStruct(a.shape, E4M3)
        of_cast = Fp8Array(like, jnp.float32(1))
        tiles = check_few_rows(of_cast if a.cast else a.x, b, dtype, None)
    else:
        tiles = check_few_rows(a, b, dtype, None)
    check_addends("multiply_prepared", a.shape, b.shape, bias, c, 1.0, None)
    most = WARPGROUP_ROWS if has_warpgroups() and isinstance(a, FewRows) and a.cast else PREPARED_ROWS
    if isinstance(a, FewRows) and not a.fits(KERNEL_ROWS):
        raise ValueError(
            f"multiply_prepared needs FewRows of bfloat16 that fit, at most {most}, with a known scale, got "
            f"{describe(a.x)} and {a.cast and a.cast.rule}; normalize and cast them before"
        )
    has_one_scale = tiles[1] is None or not (activation and is_gated(activation))
    if activation and not (isinstance(a, FewRows) and c is None and not widths and has_one_scale):
        raise ValueError(
            f"multiply_prepared activates the product of FewRows alone, without c or widths, and gates where b has one "
            f"scale, got {describe(a)}, {describe(c)} for c, {widths=} and tiles {tiles[1]} of b; activate it after"
        )
    parts_fit = 2 <= len(widths) <= MOST_PARTS and sum(widths) == b.shape[0] and not any(w % 16 for w in widths)
    if widths and (not parts_fit or c is not None):
        raise ValueError(
            f"multiply_prepared cuts {b.shape[0]} columns into 2 to {MOST_PARTS} parts that are multiples of 16, "
            f"without c, got {widths=} and {describe(c)} for c; cut the product after"
        )
    return tiles


def _whole(rule: str, split: Split, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Only rows, and columns that are no gates and no parts, stay split."""
    others = {dim: axes for dim, axes in split.items() if dim not in ("m", "n")}
    return [gathered(array, others, *dims) for array, dims in zip(arrays, parse_rule(rule)[0], strict=True)]


def _kernel(rule: str, around: Around, *arrays: jax.Array, split: Split):
    a, b, a_scale, b_scale, *others = _whole(rule, split, arrays)
    scales = zip((a_scale, b_scale), around.tiles, strict=True)
    a_scale, b_scale = (scales_as_read(scale, tile) if tile else scale for scale, tile in scales)
    how = {"dtype": around.dtype, "has_bias": around.has_bias, "has_c": around.has_c, "alpha": np.float32(1)}
    how |= {"columns": None, "scaling": SCALINGS[jnp.dtype(E4M3) if around.cast else a.dtype, around.tiles]}
    d = call_few_rows(a, b, a_scale, b_scale, *others, **how, around=around)
    if not around.widths:
        return (d,)
    flat, ends = d.reshape(-1), [d.shape[0] * end for end in accumulate(around.widths)]
    parts = zip([0, *ends[:-1]], ends, around.widths, strict=True)
    return tuple(flat[start:end].reshape(-1, width) for start, end, width in parts)


def _reference(rule: str, around: Around, *arrays: jax.Array, split: Split):
    a, b, source, b_scale, *others = _whole(rule, split, arrays)
    addends, of_norm = others[: around.has_bias + around.has_c], others[around.has_bias + around.has_c :]
    norm = NormParameters(of_norm[0], of_norm[1] if len(of_norm) > 1 else None) if of_norm else None
    a_scale = scale_of(Cast(source, around.cast)) if around.cast else source
    a = prepare_reference(a, a_scale if around.cast else None, norm, around.epsilon)
    how = {"dtype": around.dtype, "has_bias": around.has_bias, "alpha": np.float32(1), "columns": None}
    values = a.values if isinstance(a, Fp8Array) else a
    (d,) = product_reference(values, b, a_scale, b_scale, *addends, split={}, tiles=around.tiles, **how)
    if around.widths:
        return tuple(jnp.split(d, tuple(accumulate(around.widths[:-1])), axis=1))
    return (activate(d, around.activation) if around.activation else d,)


def product_of(
    rows: Fp8Array | FewRows, dtype: jax.typing.DTypeLike, activation: str | None, accumulation: str
) -> Callable[..., jax.Array]:
    """The product of these rows by a weight, as a function of the weight, `bias=` and `c=`, which it does not write
    over. Only rows that the kernel prepares can have an activation.
    """
    if isinstance(rows, FewRows):
        return partial(multiply_prepared, rows, dtype=dtype, activation=activation)
    return partial(matmul, rows, c_in_place=False, dtype=dtype, accumulation=accumulation)


def can_be_cut(a: Fp8Array | FewRows, b: Fp8Array, widths: tuple[int, ...]) -> bool:
    """Whether this kernel makes the product of these operands in parts of these widths."""
    of_a = None if isinstance(a, FewRows) or a.scale.ndim == 0 else a.granularity
    of_b = b.granularity if b.scale.ndim else None
    dtype = jnp.dtype(E4M3) if isinstance(a, FewRows) else a.dtype
    is_known = (dtype, (of_a, of_b)) in SCALINGS and b.dtype == E4M3 and is_alone()
    is_few = isinstance(a, FewRows) or has_few_rows(a.shape[0])
    return is_known and is_few and 2 <= len(widths) <= MOST_PARTS and not any(w % 16 for w in widths)
