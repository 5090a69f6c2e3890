"""Quantizing, bit for bit against NumPy: every bfloat16, every float16, and random bit patterns of float32.

Left out are inputs below 2**-126 in size: they are subnormal in float32, and XLA's CPU compiler flushes them to zero
(see kernels/quantize.py). They matter only to scales near 2**-126. Subnormal float16 are normal in float32: they stay.
"""

import importlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from emitters import EAGER_AND_JITTED
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3, E5M2, fp8_max
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.kernels import dispatch
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.casting import quantize_reference
from jax_fp8.kernels.quantize import (
    column_sums_reference,
    quantize,
    quantize_rowwise,
    quantize_transpose,
    quantize_transpose_sums,
)

quantize_module = importlib.import_module("jax_fp8.kernels.quantize")

CAST = Cast.with_scale(E4M3, 0.3)
SCALES = [1.0, 0.0123, 3.7, 448.0, 1e30, 2.0**-126, 2.0**126]


def keep_flushed_out(x) -> np.ndarray:
    size = np.abs(x.astype(np.float32))
    return x[~((size > 0) & (size < 2.0**-126))]


def every_bit_pattern(dtype) -> np.ndarray:
    return keep_flushed_out(np.arange(2**16, dtype=np.uint16).view(dtype))


def random_bit_patterns() -> np.ndarray:
    return keep_flushed_out(np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32))


INPUTS = {
    "bfloat16": every_bit_pattern(ml_dtypes.bfloat16),
    "float16": every_bit_pattern(np.float16),
    "float32": random_bit_patterns(),
}


def normal(*shape) -> np.ndarray:
    return np.asarray(np.random.default_rng(0).normal(size=shape), ml_dtypes.bfloat16)


def test_the_inputs_are_all_there():
    assert [x.size for x in INPUTS.values()] >= [2**16 - 254, 2**16, 99_000]  # bfloat16 has 2 * 127 subnormals
    for x in INPUTS.values():
        assert np.isnan(x.astype(np.float32)).any()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", INPUTS)
@EAGER_AND_JITTED
def test_bits(dtype, source, transform):
    x = INPUTS[source]
    fn = transform(lambda x, scale: quantize_rowwise(x, Cast.with_scale(dtype, scale)))
    for scale in SCALES:
        pair = fn(jnp.asarray(x), jnp.float32(scale))
        values, expected_amax = reference.quantize(x, dtype, scale)
        assert_same_bits(pair.rowwise.values, values)
        assert_same_bits(pair.rowwise.scale, np.float32(scale))
        assert_same_bits(pair.amax, expected_amax)
        assert pair.columnwise is None


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_halfway_between_two_values_the_last_bit_of_the_reciprocal_decides(dtype):
    """The negative control: a division instead of a multiplication with the rounded reciprocal would be noticed."""
    values = np.arange(1, 0x7B, dtype=np.uint8).view(np.dtype(dtype)).astype(np.float32)
    halfway = (values[1:] + values[:-1]) / 2 * np.float32(3.7)
    x = np.concatenate([np.nextafter(halfway, np.float32(0)), halfway, np.nextafter(halfway, np.float32(np.inf))])
    quantized = quantize(jnp.asarray(x), dtype, 3.7).values
    assert_same_bits(quantized, reference.quantize(x, dtype, 3.7)[0])
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(quantized, (x / np.float32(3.7)).astype(dtype))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_saturation_and_special_values(dtype):
    largest = float(fp8_max(dtype))
    x = jnp.float32([np.inf, -np.inf, 1e30, -1e30, largest, 0.0, -0.0, np.nan, -np.nan])
    values = np.asarray(quantize(x, dtype, 1.0).values)
    assert_same_bits(values[:7], np.array([largest, -largest, largest, -largest, largest, 0.0, -0.0], dtype))
    assert list(values[7:].view(np.uint8)) == [0x7F, 0x7F]
    assert np.isnan(values[7:].astype(np.float32)).all()


def test_ties_go_to_even():
    """Between 16 and 32, E4M3 has steps of 2."""
    assert_same_bits(quantize(jnp.float32([17, 19, 21, 23]), E4M3, 1.0).values, np.array([16, 20, 20, 24], E4M3))


@pytest.mark.parametrize(("dtype", "kind"), [(E4M3, "float8_e4m3fn"), (E5M2, "float8_e5m2")])
def test_values_times_scale_is_x(dtype, kind):
    x = normal(64, 32)
    scale = reference.scale_from_amax(reference.amax(x), dtype)
    quantized = quantize(jnp.asarray(x), dtype, scale)
    reference.assert_close(quantized.dequantize(), x, kind)
    with pytest.raises(AssertionError, match="relative error"):  # one name for the scale: its reciprocal is not it
        reference.assert_close(np.asarray(quantized.values, np.float32) / scale, x, kind)


@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (2, 3, 5), (0, 5), (5, 0)])
def test_any_shape(shape):
    x = normal(*shape)
    both = jax.jit(lambda x: (quantize_rowwise(x, Cast.with_scale(E4M3, 0.5)), quantize(x, E4M3, 0.5)))
    pair, alone = both(x)
    values, expected_amax = reference.quantize(x, E4M3, 0.5)
    assert_same_bits(pair.rowwise.values, values)
    assert_same_bits(pair.amax, expected_amax)
    assert_same_bits(alone.values, values)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(16, 16), (5, 3), (1, 7), (0, 3)])
@EAGER_AND_JITTED
def test_both_orientations(dtype, shape, transform):
    x = normal(*shape)
    if x.size:
        x.flat[:3] = [np.inf, np.nan, -0.0]
    pair = transform(lambda x, scale: quantize_transpose(x, Cast.with_scale(dtype, scale)))(
        jnp.asarray(x), jnp.float32(0.3)
    )
    values, expected_amax = reference.quantize(x, dtype, 0.3)
    assert_same_bits(pair.rowwise.values, values)
    assert_same_bits(pair.columnwise.values, values.T)
    assert_same_bits(pair.amax, expected_amax)
    assert_same_bits(pair.columnwise.scale, pair.rowwise.scale)
    assert pair.shares_scale


@pytest.mark.parametrize("source", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("shape", [(300, 16), (5, 3), (0, 3), (3, 0)])
@EAGER_AND_JITTED
def test_sums_of_columns(shape, source, transform):
    """In float32, whatever the dtype: a sum of 300 bfloat16 would be off by a percent."""
    x = (normal(*shape).astype(np.float32) + 1).astype(source)
    pair, sums = transform(lambda x: quantize_transpose_sums(x, CAST))(jnp.asarray(x))
    jax.tree.map(assert_same_bits, pair, jax.jit(quantize_transpose)(x, CAST))
    assert (sums.shape, sums.dtype) == (shape[1:], np.float32)
    if x.size:
        reference.assert_close(sums, x.astype(np.float64).sum(axis=0), "float32")
        with pytest.raises(AssertionError, match="relative error"):
            reference.assert_close(
                np.sum(x[:-1].astype(np.float64), axis=0), x.astype(np.float64).sum(axis=0), "float32"
            )
    else:
        assert not np.asarray(sums).any()


WIDTHS = [(16, 32, 48), (32, 64), (96,), (1, 90, 5)]


def side_by_side(x, widths):
    return tuple(np.split(x, np.cumsum(widths)[:-1], axis=1))


@pytest.mark.parametrize("quantized", [quantize_transpose, quantize_transpose_sums])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@EAGER_AND_JITTED
def test_matrices_side_by_side_are_one(quantized, widths, transform):
    x = normal(33, 96)
    cast = Cast.with_scale(E5M2, 0.3)
    whole = jax.jit(quantized)(x, cast)
    parts = side_by_side(x, widths)
    jax.tree.map(assert_same_bits, transform(lambda parts: quantized(parts, cast))(parts), whole)
    if len(parts) > 1:
        with pytest.raises(AssertionError, match=r"elements differ|shape"):
            jax.tree.map(assert_same_bits, jax.jit(quantized)(parts[::-1], cast), whole)


AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


@AXIS_TYPES
@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P("data", "model")], ids=str)
def test_matrices_side_by_side_on_a_mesh(spec, axis_type):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    x = np.random.default_rng(0).integers(-3, 4, (32, 96)).astype(ml_dtypes.bfloat16)
    with jax.set_mesh(mesh):
        parts = tuple(jax.device_put(part, NamedSharding(mesh, spec)) for part in side_by_side(x, WIDTHS[0]))
        got = jax.jit(lambda parts: quantize_transpose_sums(parts, CAST))(parts)
    jax.tree.map(assert_same_bits, got, jax.jit(quantize_transpose_sums)(x, CAST))


@pytest.fixture
def seen(monkeypatch, traced_anew) -> list[tuple[int, int]]:
    """The kernels run, written in `jnp`, and note the shape of what they are given, side by side."""
    shapes = []

    def ffi_call(target, results):
        def call(first, scale, *further, **attributes):
            x = jnp.concatenate([first, *further], axis=1)
            shapes.append(x.shape)
            values = quantize_reference(x, results[0].dtype, scale)
            partial_sums = [jnp.zeros(result.shape) for result in results[5:]]
            sums = [column_sums_reference(x)] * len(partial_sums)
            found = [values, values.T, amax_reference(x), scale, *sums, *partial_sums]
            assert [array.shape for array in found] == [result.shape for result in results]
            return found

        return call

    monkeypatch.setattr(dispatch, "_on_platform", lambda kernel, reference, *args: kernel(*args))
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    return shapes


ALL, FIRST = [P(None, "model")] * 3, [P(None, "model"), P(), P()]
# What splits the columns of matrices, on how many devices, and the shape of what a kernel is given.
COLUMN_SPLITS = {
    "2": ((1, 2), ALL, (32, 48)),
    "4": ((1, 4), ALL, (32, 24)),
    "2, rows by 2": ((2, 2), [P("data", "model")] * 3, (16, 48)),
    "2, of the first": ((1, 2), FIRST, (32, 88)),
    "4, of the first": ((1, 4), FIRST, (32, 84)),
    "each by another": ((2, 2), [P(None, "model"), P(None, "data"), P()], (32, 72)),
}


def cast_columns(shape, specs, axis_type, quantized):
    """What is made of matrices that are placed so, and what it should be: of the one matrix, by the reference."""
    x = np.random.default_rng(0).integers(-3, 4, (32, 96)).astype(ml_dtypes.bfloat16)
    x[17, 40] = -99  # the amax, which one shard sees
    values, largest = reference.quantize(x, E4M3, 0.3)
    sums = x.astype(np.float32).sum(axis=0)
    expected = Fp8Pair.with_shared_scale(values, values.T, np.float32(0.3), largest)
    devices = jax.devices()[: np.prod(shape)]
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(axis_type,) * 2, devices=devices)
    with jax.set_mesh(mesh):
        placed = zip(side_by_side(x, WIDTHS[0]), specs, strict=True)
        parts = tuple(jax.device_put(part, NamedSharding(mesh, spec)) for part, spec in placed)
        got = jax.jit(lambda parts: quantized(parts, CAST))(parts)
    return got, (expected, sums) if quantized is quantize_transpose_sums else expected


@AXIS_TYPES
@pytest.mark.parametrize("quantized", [quantize_transpose, quantize_transpose_sums])
@pytest.mark.parametrize(("shape", "specs", "given"), COLUMN_SPLITS.values(), ids=COLUMN_SPLITS)
@pytest.mark.parametrize("form", ["reference", "kernel"])
def test_columns_that_a_mesh_splits(form, shape, specs, given, quantized, axis_type, request):
    seen = request.getfixturevalue("seen") if form == "kernel" else [given]
    jax.tree.map(assert_same_bits, *cast_columns(shape, specs, axis_type, quantized))
    assert (
        min(seen) == given
    )  # kernels cast shards: bytes are gathered, and not numbers of twice or four times their size


@AXIS_TYPES
def test_columns_in_the_order_of_shards_would_be_noticed(axis_type, seen, monkeypatch):
    def in_the_order_of_shards(array, matrices, split, dim):
        return dispatch.gathered(array, {"n": split.get("a", ())}, *[""] * dim, "n")

    monkeypatch.setattr(quantize_module, "_whole_columns", in_the_order_of_shards)
    got, expected = cast_columns((1, 2), ALL, axis_type, quantize_transpose_sums)
    for actual, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if actual.ndim:
            with pytest.raises(AssertionError, match="elements differ"):
                assert_same_bits(actual, wanted)


@AXIS_TYPES
@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P("data", "model")], ids=str)
def test_sums_are_over_all_shards(spec, axis_type):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    x = np.random.default_rng(0).integers(-3, 4, (32, 16)).astype(ml_dtypes.bfloat16)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        sums = jax.jit(lambda x: quantize_transpose_sums(x, CAST)[1])(placed)
    assert_same_bits(sums, x.astype(np.float32).sum(axis=0))


ROW, MATRIX = jnp.ones(2), jnp.ones((2, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(ROW, jnp.float16, 1.0), "dtype must be E4M3 or E5M2, got .*float16.*pass jax_fp8.E4M3"),
        (
            lambda: quantize(jnp.ones(2, jnp.int32), E4M3, 1.0),
            "quantize needs float32, bfloat16 or float16, got int32; cast first",
        ),
        (lambda: quantize(ROW, E4M3, ROW), r"scale must be a scalar, got shape \(2,\); quantize with one scale"),
        (lambda: quantize_rowwise(ROW, Cast.with_scale(jnp.float16, 1)), "dtype must be E4M3 or E5M2, got .*float16"),
        (lambda: quantize_rowwise(jnp.ones(2, E4M3), CAST), "needs float32, bfloat16 or float16, got float8_e4m3fn"),
        (
            lambda: quantize_transpose(MATRIX.astype(int), Cast.from_amax(E4M3, 1, ScaleFormula())),
            "quantize needs float32, bfloat16 or float16, got int32",
        ),
        (lambda: quantize_transpose(ROW, CAST), r"quantize_transpose needs a matrix, got shape \(2,\); flatten"),
        (lambda: quantize_transpose_sums(ROW, CAST), r"quantize_transpose_sums needs a matrix, got shape \(2,\)"),
        (lambda: quantize_transpose(MATRIX[None], CAST), r"quantize_transpose needs a matrix, got shape \(1, 2, 2\)"),
        (
            lambda: quantize_transpose((MATRIX,) * 4, CAST),
            "quantize_transpose takes 1 to 3 matrices side by side, got 4",
        ),
        (
            lambda: quantize_transpose((MATRIX, jnp.ones((3, 2))), CAST),
            r"must have as many rows and the same dtype, got float32\[2, 2\], float32\[3, 2\]",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
