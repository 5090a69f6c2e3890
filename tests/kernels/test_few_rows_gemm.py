"""Products of few rows against a float64 oracle; exactly, where the numbers are small integers and every sum is one."""

import cpp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close, assert_same_bits

from jax_fp8.core.cast import LINE, SQUARE
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Array, tiles_of
from jax_fp8.kernels import gemm
from jax_fp8.kernels.few_rows_gemm import KERNEL_ROWS, MOST_ROWS, is_for_few_rows, multiply_few_rows
from jax_fp8.kernels.gemm import matmul

BF16 = jnp.dtype(jnp.bfloat16)
# The dtype of a, and the tiles of a and of b.
PAIRS = {
    "one scale": (E4M3, None, None),
    "lines by squares": (E4M3, LINE, SQUARE),
    "bfloat16": (BF16, None, None),
    "bfloat16 by squares": (BF16, None, SQUARE),
}
SHAPES = [(1, 48, 16), (8, 144, 272), (33, 16, 144), (64, 272, 48)]  # m, n, k


def operand(seed, shape, dtype, tile, integers=False):
    """An Fp8Array, or an array of bfloat16. Scales are powers of two where sums are to be exact."""
    random = np.random.default_rng(seed)
    values = random.integers(-3, 4, shape) if integers else random.normal(size=shape, scale=10)
    values = jnp.asarray(values.astype(np.dtype(dtype)))
    if dtype == BF16:
        return values
    exponents = random.integers(-1, 2, tiles_of(shape, tile) if tile else ())
    scales = np.exp2(exponents) if integers else np.exp2(exponents) * random.uniform(0.7, 1.4, exponents.shape)
    return Fp8Array(values, jnp.asarray(scales, jnp.float32), tile) if tile else Fp8Array(values, jnp.float32(scales))


def operands(m, n, k, pair, integers=False):
    dtype, of_a, of_b = PAIRS[pair]
    return operand(0, (m, k), dtype, of_a, integers), operand(1, (n, k), E4M3, of_b, integers)


def spread(x, shift=0) -> np.ndarray:
    """The scale of every element; with a shift, that of a tile further on."""
    if not isinstance(x, Fp8Array):
        return np.ones(())
    scale = np.asarray(x.scale, np.float64)
    if scale.ndim == 0:
        return scale
    every = np.roll(scale, shift, axis=1).repeat(x.tile[0], axis=0).repeat(x.tile[1], axis=1)
    return every[: x.shape[0], : x.shape[1]]


def oracle(a, b, shift=0, **addends) -> np.ndarray:
    values = a.values if isinstance(a, Fp8Array) else a
    return reference.matmul(values, b.values, spread(a, shift), spread(b, shift), **addends)


def normal(seed, *shape, dtype=np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape, scale=100), dtype)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_against_float64(m, n, k, pair):
    a, b = operands(m, n, k, pair)
    assert_close(multiply_few_rows(a, b, dtype=jnp.float32), oracle(a, b), "gemm_float32")
    assert_close(jax.jit(multiply_few_rows)(a, b), oracle(a, b), "gemm_bfloat16")


@pytest.mark.parametrize("pair", ["lines by squares", "bfloat16 by squares"])
def test_scales_of_other_tiles_would_be_noticed(pair):
    a, b = operands(8, 144, 272, pair)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(multiply_few_rows(a, b), oracle(a, b, shift=1), "gemm_bfloat16")


@pytest.mark.parametrize("pair", PAIRS)
def test_integers_are_exact(pair):
    a, b = operands(5, 48, 272, pair, integers=True)
    bias, c = jnp.arange(48.0), jnp.arange(240.0).reshape(5, 48)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        product = multiply_few_rows(a, b, dtype=dtype, bias=bias, c=c.astype(dtype), alpha=0.5)
        assert_same_bits(product, oracle(a, b, bias=bias, c=c, alpha=0.5).astype(dtype))


@pytest.mark.parametrize("pair", PAIRS)
def test_bias_and_addend(pair):
    a, b = operands(5, 48, 272, pair)
    bias, c = normal(2, 48), normal(3, 5, 48)
    both = multiply_few_rows(a, b, dtype=jnp.float32, bias=bias, c=c, alpha=0.3)
    added = {"bias": bias.astype(jnp.bfloat16), "c": c}
    assert_close(both, oracle(a, b, alpha=np.float32(0.3), **added), "gemm_float32")
    for forgotten in added:
        rest = {name: array for name, array in added.items() if name != forgotten}
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(both, oracle(a, b, alpha=np.float32(0.3), **rest), "gemm_float32")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("columns", [(0, 16), (128, 144), (256, 16), (0, 272), (128, 0)])
def test_some_columns_are_those_of_the_whole(columns, pair):
    a, b = operands(5, 272, 144, pair, integers=True)
    bias, c, wanted = jnp.arange(272.0), normal(3, 5, 272).astype(jnp.bfloat16), slice(columns[0], sum(columns))
    whole = multiply_few_rows(a, b, bias=bias, c=c)
    assert_same_bits(multiply_few_rows(a, b, bias=bias, c=c[:, wanted], columns=columns), whole[:, wanted])


@pytest.mark.parametrize("pair", ["one scale", "lines by squares"])
def test_the_reference_is_that_of_matmul(pair):
    a, b = operands(8, 144, 272, pair)
    assert_same_bits(multiply_few_rows(a, b), matmul(a, b))


def test_under_vmap():
    b = operand(1, (48, 32), E4M3, None, integers=True)
    rows = jnp.stack([operand(seed, (3, 32), BF16, None, integers=True) for seed in (2, 3)])
    products = jax.vmap(lambda a: multiply_few_rows(a, b, dtype=jnp.float32))(rows)
    for a, product in zip(rows, products, strict=True):
        assert_same_bits(product, oracle(a, b).astype(np.float32))


# Of an axis of 2 devices, what it splits of a, b and c.
SPLITS = {"k": (P(None, "data"), P(None, "data"), P()), "n": (P(), P("data"), P(None, "data"))}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("pair", PAIRS)
def test_on_a_mesh(pair, split, axis_type):
    a, b = operands(6, 256, 256, pair, integers=True)
    bias, c = jnp.arange(256.0), normal(3, 6, 256).astype(jnp.int32).astype(jnp.float32)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])

    def place(x, spec):
        if not isinstance(x, Fp8Array):
            return jax.device_put(x, NamedSharding(mesh, spec))
        scale = jax.device_put(x.scale, NamedSharding(mesh, P()))
        return Fp8Array(place(x.values, spec), scale, x.tile)

    multiply = jax.jit(lambda a, b, bias, c: multiply_few_rows(a, b, dtype=jnp.float32, bias=bias, c=c))
    with jax.set_mesh(mesh):
        placed = [place(x, spec) for x, spec in zip((a, b, c), SPLITS[split], strict=True)]
        product = multiply(*placed[:2], place(bias, P()), placed[2])
    assert_same_bits(product, oracle(a, b, bias=bias, c=c).astype(np.float32))


@pytest.mark.parametrize("pair", PAIRS)
def test_where_kernels_run_it_is_one_custom_call(pair, with_kernels):
    a, b = operands(5, 256, 272, pair)
    bias, c = normal(2, 256), normal(3, 5, 128, dtype=jnp.bfloat16)
    product = jax.jit(lambda a, b, bias, c: multiply_few_rows(a, b, bias=bias, c=c, columns=(128, 128)))
    text = product.trace(a, b, bias, c).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @jax_fp8_few_rows_gemm") == 1
    scaling = {"one scale": "", "lines by squares": "1d2d", "bfloat16": "", "bfloat16 by squares": "2d"}[pair]
    for attribute in (f'scaling = "{scaling}"', "first_column = 128", "has_bias = true", "has_c = true", "config = 0"):
        assert attribute in text


def test_matmul_gives_it_products_of_few_rows(with_kernels):
    assert (MOST_ROWS, KERNEL_ROWS) == (16, 64) and not is_for_few_rows(1, E4M3, E5M2, "")

    def calls(m, pair, b_dtype=E4M3, **settings):
        a, b = operands(m, 272, 144, pair)
        b = Fp8Array(b.values.astype(b_dtype), b.scale, b.tile) if pair == "lines by squares" else b
        text = jax.jit(lambda a, b: gemm.matmul(a, b, **settings)).trace(a, b)
        return text.lower(lowering_platforms=("cuda",)).as_text().count("@jax_fp8_few_rows_gemm")

    assert calls(16, "one scale") == calls(16, "lines by squares") == 1
    assert calls(17, "one scale") == calls(17, "lines by squares") == 0
    assert calls(8, "lines by squares", columns=(128, 144)) == 1
    c = jnp.zeros((8, 272), jnp.bfloat16)
    assert calls(8, "one scale", c=c) == 1
    assert calls(8, "lines by squares", columns=(16, 128)) == 0  # cuts squares


@pytest.mark.parametrize("c_in_place", [True, False])
def test_a_sum_is_written_over_its_addend(c_in_place, with_kernels):
    (a, b), bias, c = operands(5, 64, 144, "one scale"), normal(2, 64), normal(3, 5, 64, dtype=jnp.bfloat16)
    add = jax.jit(lambda *of: gemm.matmul(*of[:2], bias=of[2], c=of[3], c_in_place=c_in_place))
    text = add.trace(a, b, bias, c).lower(lowering_platforms=("cuda",)).as_text()
    assert "@jax_fp8_few_rows_gemm" in text
    assert ("operand_index = 5" in text) == c_in_place  # after a, b, their scales and the bias


def test_the_kernel_multiplies_as_many_rows_as_it_says():
    assert cpp.constant("device/few_rows_gemm_plan.cuh", "kMostRows") == KERNEL_ROWS


def call(a_shape=(8, 16), b_shape=(16, 16), a_dtype=E4M3, b_dtype=E4M3, tiles=(None, None), **settings):
    return multiply_few_rows(operand(0, a_shape, a_dtype, tiles[0]), operand(1, b_shape, b_dtype, tiles[1]), **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a_dtype": E5M2}, r"needs an E4M3 Fp8Array or a bfloat16 array, got .* for a; cast it, or use matmul"),
        ({"b_dtype": E5M2}, r"needs an E4M3 Fp8Array, got .* for b; pass fp8.quantize"),
        ({"b_dtype": BF16}, r"needs an E4M3 Fp8Array, got .* for b; pass fp8.quantize"),
        ({"b_shape": (16, 32)}, r"needs a \(m, k\) and b \(n, k\), .*got a \(8, 16\) and b \(16, 32\)"),
        ({"a_shape": (8, 24), "b_shape": (16, 24)}, "needs k and n to be multiples of 16, and k not 0"),
        ({"b_shape": (24, 16)}, r"k and n to be multiples of 16.*got a \(8, 16\) and b \(24, 16\); pad the input"),
        ({"a_shape": (65, 16)}, r"needs at most 64 rows, got a \(65, 16\) and b \(16, 16\); use matmul"),
        ({"tiles": (LINE, None)}, r"needs one scale a tensor, .*got tiles \(1, 128\) of a .* and None of b"),
        ({"tiles": (None, LINE)}, r"needs one scale a tensor, .*got tiles None of a .* and \(1, 128\) of b"),
        ({"dtype": jnp.int32}, r"writes bfloat16, float16 or float32, got dtype=.*int32"),
        ({"columns": (0, 32)}, r"columns must be the first and the number of some of the 16, .*got \(0, 32\)"),
        (
            {"columns": (16, 16), "b_shape": (32, 16), "a_dtype": BF16, "tiles": (None, SQUARE)},
            r"the first of columns to be a multiple of 128 where b has a scale for each square, got \(16, 16\)",
        ),
        ({"bias": jnp.ones(8)}, r"multiply_few_rows needs bias of shape \(16,\), got float32\[8\]"),
        ({"c": jnp.ones((16, 8))}, r"multiply_few_rows needs c of shape \(8, 16\)"),
    ],
)
def test_errors(arguments, message):
    call()
    with pytest.raises(ValueError, match=message):
        call(**arguments)
