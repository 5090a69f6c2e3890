"""The FP8 product against a float64 oracle; exactly, where the numbers are small integers and every sum is one too."""

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close, assert_same_bits

from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Array, tiles_of
from jax_fp8.kernels import extension
from jax_fp8.kernels.gemm import matmul

REASON = h200.missing_reason() or extension.missing_reason()
OPERANDS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
SHAPES = [(16, 16, 16), (1, 32, 48), (35, 64, 16)]  # m, k, n; m is free


def operand(seed, shape, dtype, scale=1.0) -> Fp8Array:
    values = np.random.default_rng(seed).normal(size=shape, scale=10).astype(np.dtype(dtype))
    return Fp8Array(jnp.asarray(values), jnp.float32(scale))


def integers(seed, shape, dtype, scale=1.0) -> Fp8Array:
    """Integers from -3 to 3, exact in both formats."""
    values = np.random.default_rng(seed).integers(-3, 4, shape).astype(np.dtype(dtype))
    return Fp8Array(jnp.asarray(values), jnp.float32(scale))


def normal(seed, *shape, dtype=np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape, scale=100), dtype)


def oracle(a, b, **addends) -> np.ndarray:
    return reference.matmul(a.values, b.values, a.scale, b.scale, **addends)


@pytest.mark.parametrize(("a_dtype", "b_dtype"), OPERANDS)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_against_float64(a_dtype, b_dtype, m, k, n):
    a, b = operand(0, (m, k), a_dtype, 0.3), operand(1, (n, k), b_dtype, 7.0)
    assert_close(matmul(a, b, dtype=jnp.float32), oracle(a, b), "gemm_float32")
    assert_close(matmul(a, b), oracle(a, b), "gemm_bfloat16")


@pytest.mark.parametrize(("a_dtype", "b_dtype"), OPERANDS)
@pytest.mark.parametrize("accumulation", ["fast", "split"])
def test_integers_are_exact(a_dtype, b_dtype, accumulation):
    a, b = integers(0, (35, 64), a_dtype, 0.5), integers(1, (16, 64), b_dtype, 4.0)
    exact = oracle(a, b)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        assert_same_bits(matmul(a, b, dtype=dtype, accumulation=accumulation), exact.astype(dtype))
    jitted = jax.jit(lambda a, b: matmul(a, b, dtype=jnp.float32, accumulation=accumulation))
    assert_same_bits(jitted(a, b), exact.astype(np.float32))


@pytest.mark.parametrize("wrong", ["a_scale", "b_scale", "transposed", "zero"])
def test_a_wrong_product_would_be_noticed(wrong):
    a, b = operand(0, (16, 16), E4M3, 0.3), operand(1, (16, 16), E4M3, 7.0)
    expected = {
        "a_scale": reference.matmul(a.values, b.values, 1.0, b.scale),
        "b_scale": reference.matmul(a.values, b.values, a.scale, 1.0),
        "transposed": oracle(a, b).T,
    }.get(wrong)
    product = matmul(a, b)
    with pytest.raises(AssertionError, match="relative error"):
        if wrong == "zero":
            assert_close(jnp.zeros_like(product), oracle(a, b), "gemm_bfloat16")
        else:
            assert_close(product, expected, "gemm_bfloat16")


@pytest.mark.parametrize(
    ("dtype", "kind"), [(jnp.float32, "gemm_float32"), (jnp.bfloat16, "gemm_bfloat16"), (jnp.float16, "float16")]
)
def test_bias_and_addend(dtype, kind):
    a, b = operand(0, (35, 32), E4M3, 0.5), operand(1, (16, 32), E4M3, 0.25)
    bias, c = normal(2, 16), normal(3, 35, 16, dtype=dtype)
    added = bias.astype(jnp.bfloat16 if dtype == jnp.float32 else dtype)  # cuBLASLt adds a bias in at most 16 bits
    assert_close(matmul(a, b, dtype=dtype, bias=bias), oracle(a, b, bias=added), kind)
    assert_close(matmul(a, b, dtype=dtype, c=c), oracle(a, b, c=c), kind)
    both = matmul(a, b, dtype=dtype, bias=bias, c=c)
    assert_close(both, oracle(a, b, bias=added, c=c), kind)
    for forgotten in ({"bias": added}, {"c": c}):
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(both, oracle(a, b, **forgotten), kind)


def test_addends_of_integers_are_exact():
    a, b = integers(0, (16, 32), E4M3, 2.0), integers(1, (16, 32), E5M2)
    bias, c = jnp.arange(16.0), jnp.arange(256.0).reshape(16, 16)
    actual = matmul(a, b, dtype=jnp.float32, bias=bias, c=c)
    assert_same_bits(actual, oracle(a, b, bias=bias, c=c).astype(np.float32))


@pytest.mark.parametrize("alpha", [0.25, 1 / 3])
def test_alpha_multiplies_the_product_only(alpha):
    a, b, c = operand(0, (16, 32), E4M3, 0.5), operand(1, (16, 32), E5M2), normal(2, 16, 16)
    actual = matmul(a, b, dtype=jnp.float32, c=c, alpha=alpha)
    assert_close(actual, oracle(a, b, c=c, alpha=alpha), "gemm_float32")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(actual, oracle(a, b, c=c), "gemm_float32")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(actual, alpha * oracle(a, b, c=c), "gemm_float32")


def test_a_donated_accumulator():
    a, b = integers(0, (16, 32), E4M3), integers(1, (16, 32), E4M3)
    accumulate = jax.jit(lambda c, a, b: matmul(a, b, dtype=jnp.float32, c=c, accumulation="split"), donate_argnums=0)
    total = accumulate(accumulate(jnp.zeros((16, 16)), a, b), a, b)
    assert_same_bits(total, (2 * oracle(a, b)).astype(np.float32))


@pytest.mark.parametrize("c_in_place", [True, False])
def test_an_addend_that_stays(c_in_place, with_kernels):
    """A residual that is used again is written over only by request; the numbers are the same."""
    a, b = integers(0, (16, 32), E4M3), integers(1, (16, 32), E4M3)
    c = jnp.arange(256.0).reshape(16, 16)

    def add_twice(a, b, c):
        return matmul(a, b, dtype=jnp.float32, c=c, c_in_place=c_in_place) + c

    assert_same_bits(jax.jit(add_twice)(a, b, c), oracle(a, b, c=2 * c).astype(np.float32))
    text = jax.jit(add_twice).trace(a, b, c).lower(lowering_platforms=("cuda",)).as_text()
    assert "has_c = true" in text and ("output_operand_alias" in text) == c_in_place


def test_an_accumulator_is_added_once_where_a_mesh_splits_the_contraction():
    a, b, c = integers(0, (32, 64), E4M3), integers(1, (16, 64), E4M3), jnp.arange(512.0).reshape(32, 16)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    specs = P(None, "data"), P("model", "data"), P(None, "model")
    with jax.set_mesh(mesh):
        arrays = zip((a.values, b.values, c), specs, strict=True)
        *placed, total = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in arrays]
        accumulate = jax.jit(lambda a, b, c: matmul(a, b, dtype=jnp.float32, c=c))
        d = accumulate(*(Fp8Array(values, jnp.float32(1)) for values in placed), total)
    assert_same_bits(d, oracle(a, b, c=c).astype(np.float32))


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("c_in_place", [True, False])
def test_an_addend_is_copied_where_it_should_stay_and_not_where_it_is_donated(c_in_place):
    def add(a, b, c):
        return matmul(Fp8Array(a, jnp.float32(1)), Fp8Array(b, jnp.float32(1)), c=c, c_in_place=c_in_place)

    a, b = jax.ShapeDtypeStruct((256, 64), E4M3), jax.ShapeDtypeStruct((512, 64), E4M3)
    c = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    on = h200.on_one_device()
    kept = h200.compile(jax.jit(add), *h200.shapes((a, b, c), on))
    donated = h200.compile(jax.jit(add, donate_argnums=2), *h200.shapes((a, b, c), on))
    # Each is free where it belongs, and a copy where the other does.
    copied = kept if c_in_place else donated
    assert [copy.results[0].bytes for copy in copied.copies] == [2 * 256 * 512]
    assert len(kept.copies + donated.copies) == 1
    assert kept.custom_calls["jax_fp8_gemm"] == donated.custom_calls["jax_fp8_gemm"] == 1


@pytest.mark.parametrize("columns", [(0, 16), (16, 32), (32, 16), (0, 48), (16, 0)])
def test_some_columns_are_those_of_the_whole(columns):
    a, b = operand(0, (35, 32), E4M3, 0.5), operand(1, (48, 32), E5M2, 0.25)
    bias, c = normal(2, 48), normal(3, 35, 48, dtype=jnp.bfloat16)
    wanted = slice(columns[0], sum(columns))
    whole = matmul(a, b, bias=bias, c=c)
    assert_same_bits(matmul(a, b, bias=bias, c=c[:, wanted], columns=columns), whole[:, wanted])
    assert_same_bits(jax.jit(lambda a, b: matmul(a, b, columns=columns))(a, b), matmul(a, b)[:, wanted])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("spec", [P("model"), P(None, "model"), P("model", "data")], ids=str)
def test_some_columns_where_a_mesh_splits_them(spec, axis_type):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    a, b, bias = integers(0, (32, 64), E4M3), integers(1, (96, 64), E4M3), jnp.arange(96.0)
    expected = matmul(a, b, bias=bias, columns=(16, 32))
    assert_same_bits(expected, oracle(a, b, bias=bias)[:, 16:48].astype(jnp.bfloat16))
    with jax.set_mesh(mesh):
        placed = Fp8Array(jax.device_put(b.values, NamedSharding(mesh, spec)), b.scale)
        bias = jax.device_put(bias, NamedSharding(mesh, P(spec[0])))
        product = jax.jit(lambda a, b, bias: matmul(a, b, bias=bias, columns=(16, 32)))(a, placed, bias)
    assert_same_bits(product, expected)


# ---- with scales by tile ---------------------------------------------------------------------------------------------

TILES = {  # of a (48, 64) and of b (32, 64); None is one scale
    "1 x 16": ((1, 16), (1, 16)),
    "rows by blocks": ((1, 16), (16, 16)),
    "blocks by rows": ((16, 32), (1, 16)),
    "by one scale": ((1, 16), None),
    "one scale by": (None, (8, 64)),
}
REPLICATED = P()


def tiled(seed, shape, tile, dtype=E4M3) -> Fp8Array:
    scales = () if tile is None else tiles_of(shape, tile)
    exponents = np.random.default_rng(seed + 10).uniform(-5, 5, scales)
    return Fp8Array(operand(seed, shape, dtype).values, jnp.asarray(np.exp2(exponents), jnp.float32))


def spread(array, shift=0) -> np.ndarray:
    """The scale of every element; with a shift, that of a tile further on."""
    scale = np.asarray(array.scale, np.float64)
    if scale.ndim == 0:
        return scale
    lengths = [size // tiles for size, tiles in zip(array.shape, scale.shape, strict=True)]
    return np.kron(np.roll(scale, shift, axis=1), np.ones(lengths))


def oracle_by_tile(a, b, shift=0, **addends) -> np.ndarray:
    return reference.matmul(a.values, b.values, spread(a, shift), spread(b, shift), **addends)


@pytest.mark.parametrize(("a_dtype", "b_dtype"), OPERANDS)
@pytest.mark.parametrize(("a_tile", "b_tile"), TILES.values(), ids=TILES)
def test_scales_by_tile_against_float64(a_tile, b_tile, a_dtype, b_dtype):
    a, b = tiled(0, (48, 64), a_tile, a_dtype), tiled(1, (32, 64), b_tile, b_dtype)
    bias, c = normal(2, 32), normal(3, 48, 32)
    product = jax.jit(lambda a, b: matmul(a, b, dtype=jnp.float32))(a, b)
    assert_close(product, oracle_by_tile(a, b), "gemm_float32")
    assert_close(matmul(a, b), oracle_by_tile(a, b), "gemm_bfloat16")
    full = matmul(a, b, dtype=jnp.float32, bias=bias, c=c, alpha=0.3)
    addends = {"bias": bias.astype(jnp.bfloat16), "c": c, "alpha": np.float32(0.3)}
    assert_close(full, oracle_by_tile(a, b, **addends), "gemm_float32")
    wrong = oracle_by_tile(a, b, shift=1) if b_tile != (8, 64) else oracle(a, Fp8Array(b.values, b.scale.mean()))
    with pytest.raises(AssertionError, match="relative error"):  # the scales of other tiles
        assert_close(product, wrong, "gemm_bfloat16")


@pytest.mark.parametrize("columns", [(0, 16), (16, 16), (0, 32), (16, 0)])
@pytest.mark.parametrize(("a_tile", "b_tile"), TILES.values(), ids=TILES)
def test_some_columns_with_scales_by_tile(a_tile, b_tile, columns):
    a, b, bias, c = tiled(0, (48, 64), a_tile), tiled(1, (32, 64), b_tile), normal(2, 32), normal(3, 48, 32)
    wanted = slice(columns[0], sum(columns))
    some = matmul(a, b, dtype=jnp.float32, bias=bias, c=c[:, wanted], columns=columns)
    assert some.shape == (48, columns[1])
    if columns[1]:
        assert_close(some, oracle_by_tile(a, b, bias=bias.astype(jnp.bfloat16), c=c)[:, wanted], "gemm_float32")


def test_equal_scales_of_tiles_are_one_scale():
    a, b = integers(0, (48, 64), E4M3, 0.5), integers(1, (32, 64), E5M2, 4.0)
    same = (Fp8Array(x.values, jnp.full((x.shape[0], 4), x.scale)) for x in (a, b))
    assert_same_bits(matmul(*same, dtype=jnp.float32), matmul(a, b, dtype=jnp.float32))


def on_mesh(axis_type, array, spec, scale_spec=REPLICATED) -> Fp8Array:
    """Placed on two devices."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])
    values = jax.device_put(array.values, NamedSharding(mesh, spec))
    return Fp8Array(values, jax.device_put(array.scale, NamedSharding(mesh, scale_spec)))


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data")], ids=str)
@pytest.mark.parametrize(("a_tile", "b_tile"), [((16, 16), (16, 16)), ((1, 16), None)])
def test_scales_by_tile_where_the_compiler_splits(a_tile, b_tile, spec):
    a, b = tiled(0, (32, 64), a_tile), tiled(1, (32, 64), b_tile)
    placed = [on_mesh(AxisType.Auto, x, spec) for x in (a, b)]
    assert_close(jax.jit(lambda a, b: matmul(a, b, dtype=jnp.float32))(*placed), oracle_by_tile(a, b), "gemm_float32")


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
@pytest.mark.parametrize("which", [0, 1])
def test_an_explicit_axis_may_split_whole_tiles(which, spec):
    for tile in ((16, 16), (32, 64)):
        a, b = tiled(0, (32, 64), tile), tiled(1, (32, 64), tile)
        operands = [on_mesh(AxisType.Explicit, x, spec if i == which else P()) for i, x in enumerate((a, b))]
        with jax.set_mesh(operands[0].values.sharding.mesh):
            if tile == (16, 16):
                assert_close(matmul(*operands, dtype=jnp.float32), oracle_by_tile(a, b), "gemm_float32")
                continue
            with pytest.raises(ValueError, match=r"whole tiles of (32|64) elements of .*, got (32|64) over 2 d"):
                matmul(*operands)


def test_scales_by_tile_that_an_explicit_axis_splits_are_gathered():
    a, b = tiled(0, (32, 64), (16, 16)), tiled(1, (32, 64), None)
    placed = on_mesh(AxisType.Explicit, a, P(), P("data")), on_mesh(AxisType.Explicit, b, P("data"))
    with jax.set_mesh(placed[0].values.sharding.mesh):  # rows of b, which has one scale, may be split
        assert_close(matmul(*placed, dtype=jnp.float32), oracle_by_tile(a, b), "gemm_float32")


def test_the_result_is_bfloat16_unless_asked():
    a = operand(0, (16, 16), E4M3)
    assert matmul(a, a).dtype == jnp.bfloat16
    assert matmul(a, a, dtype=np.float32).dtype == jnp.float32


@pytest.mark.parametrize("scales", [(5, 4), (0, 4), (4,), (4, 3)], ids=str)
def test_scales_that_are_of_no_tiles_are_refused(scales):
    a = Fp8Array(operand(0, (16, 64), E4M3).values, jnp.ones(scales))
    with pytest.raises(ValueError, match=r"scale must be a scalar, or divide each dim of the values \(16, 64\) into"):
        matmul(a, operand(1, (16, 64), E4M3))


def call(a_shape=(16, 16), b_shape=(16, 16), dtypes=(E4M3, E4M3), **settings):
    return matmul(operand(0, a_shape, dtypes[0]), operand(1, b_shape, dtypes[1]), **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"b_shape": (16, 32)},
            r"matmul needs a \(m, k\) and b \(n, k\), .*got a \(16, 16\) and b \(16, 32\); pass the transposed copy",
        ),
        ({"a_shape": (2, 16, 16)}, r"matmul needs a \(m, k\) and b \(n, k\), .*got a \(2, 16, 16\)"),
        (
            {"a_shape": (16, 24), "b_shape": (16, 24)},
            r"k and n to be multiples of 16, got a \(16, 24\) and b \(16, 24\); pad the input or use bfloat16",
        ),
        ({"b_shape": (17, 16)}, r"k and n to be multiples of 16, got a \(16, 16\) and b \(17, 16\)"),
        (
            {"dtypes": (E5M2, E5M2)},
            "two E5M2 operands, which the hardware cannot multiply; quantize one of them to E4M3",
        ),
        ({"dtype": jnp.int32}, r"matmul writes bfloat16, float16 or float32, got dtype=.*int32'>; pick one"),
        ({"accumulation": "slow"}, 'accumulation must be "fast" or "split", got \'slow\''),
        ({"columns": (0, 32)}, r"columns must be the first and the number of some of the 16, .*got \(0, 32\)"),
        ({"columns": (8, 8)}, r"multiples of 16, got \(8, 8\)"),
        ({"columns": (-16, 16)}, "the first of columns must be an integer of at least 0, got -16"),
    ],
)
def test_errors(arguments, message):
    call()
    with pytest.raises(ValueError, match=message):
        call(**arguments)
