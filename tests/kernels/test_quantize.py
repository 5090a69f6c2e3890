"""Quantizing, bit for bit against NumPy: every bfloat16, every float16, and random bit patterns of float32.

Left out are inputs below 2**-126 in size: they are subnormal in float32, and XLA's CPU compiler flushes them to zero (see kernels/quantize.py).
They matter only to scales near 2**-126. Subnormal float16 are normal in float32, and stay in.
"""

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

from jax_fp8.core.formats import E4M3, E5M2, fp8_max
from jax_fp8.kernels.quantize import (
    NOTHING,
    ORIENTATIONS,
    fp8_arrays,
    matrix_results,
    quantize,
    quantize_transpose,
    quantize_transpose_sums,
    quantize_with_amax,
    wanted,
)
from jax_fp8.kernels.scale_source import ScaleSource

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
    fn = transform(lambda x, scale: quantize_with_amax(x, dtype, scale))
    for scale in SCALES:
        quantized, amax = fn(jnp.asarray(x), jnp.float32(scale))
        values, expected_amax = reference.quantize(x, dtype, scale)
        assert_same_bits(quantized.values, values)
        assert_same_bits(quantized.scale, np.float32(scale))
        assert_same_bits(amax, expected_amax)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_halfway_between_two_values_the_last_bit_of_the_reciprocal_decides(dtype):
    """And so a division instead of a multiplication with the rounded reciprocal would be noticed: the negative control."""
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
    quantized, amax = quantize_with_amax(jnp.asarray(x), E4M3, 0.5)
    values, expected_amax = reference.quantize(x, E4M3, 0.5)
    assert_same_bits(quantized.values, values)
    assert_same_bits(amax, expected_amax)
    assert_same_bits(quantize(jnp.asarray(x), E4M3, 0.5).values, values)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(16, 16), (5, 3), (1, 7), (0, 3)])
@EAGER_AND_JITTED
def test_both_orientations(dtype, shape, transform):
    x = normal(*shape)
    if x.size:
        x.flat[:3] = [np.inf, np.nan, -0.0]
    quantized, transposed, amax = transform(lambda x, scale: quantize_transpose(x, dtype, scale))(
        jnp.asarray(x), jnp.float32(0.3)
    )
    values, expected_amax = reference.quantize(x, dtype, 0.3)
    assert_same_bits(quantized.values, values)
    assert_same_bits(transposed.values, values.T)
    assert_same_bits(amax, expected_amax)
    assert_same_bits(transposed.scale, quantized.scale)


@pytest.mark.parametrize("orientations", ORIENTATIONS)
def test_what_is_wanted_keeps_its_place(orientations):
    matrix = jnp.arange(6, dtype=jnp.float32).reshape(2, 3).astype(E4M3)
    results = matrix_results(orientations, matrix.shape, E5M2)
    arrays = fp8_arrays(orientations, wanted(orientations, matrix, matrix.T), jnp.float32(2))
    for form, result, array, expected in zip(
        ("straight", "transposed"), results, arrays, (matrix, matrix.T), strict=True
    ):
        assert result.dtype == E5M2
        if orientations in ("both", form):
            assert result.shape == expected.shape
            assert_same_bits(array.values, expected)
            assert_same_bits(array.scale, np.float32(2))
        else:
            assert result.shape == NOTHING and array is None


@pytest.mark.parametrize("source", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("shape", [(300, 16), (5, 3), (0, 3), (3, 0)])
@EAGER_AND_JITTED
def test_sums_of_columns(shape, source, transform):
    """In float32, whatever the dtype: a sum of 300 bfloat16 would be off by a percent."""
    x = (normal(*shape).astype(np.float32) + 1).astype(source)
    *quantized, sums = transform(lambda x: quantize_transpose_sums(x, E4M3, 0.3))(jnp.asarray(x))
    for actual, expected in zip(
        jax.tree.leaves(quantized), jax.tree.leaves(quantize_transpose(jnp.asarray(x), E4M3, 0.3)), strict=True
    ):
        assert_same_bits(actual, expected)
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
    return tuple(jnp.asarray(part) for part in np.split(x, np.cumsum(widths)[:-1], axis=1))


@pytest.mark.parametrize("quantized", [quantize_transpose, quantize_transpose_sums])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@EAGER_AND_JITTED
def test_matrices_side_by_side_are_one(quantized, widths, transform):
    x = normal(33, 96)
    whole = quantized(jnp.asarray(x), E5M2, 0.3)
    parts = side_by_side(x, widths)
    jax.tree.map(assert_same_bits, transform(lambda parts: quantized(parts, E5M2, 0.3))(parts), whole)
    if len(parts) > 1:
        with pytest.raises(AssertionError, match=r"elements differ|shape"):
            jax.tree.map(assert_same_bits, quantized(parts[::-1], E5M2, 0.3), whole)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P("data", "model")], ids=str)
def test_matrices_side_by_side_on_a_mesh(spec, axis_type):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    x = np.random.default_rng(0).integers(-3, 4, (32, 96)).astype(ml_dtypes.bfloat16)
    with jax.set_mesh(mesh):
        parts = tuple(jax.device_put(part, NamedSharding(mesh, spec)) for part in side_by_side(x, WIDTHS[0]))
        got = jax.jit(lambda parts: quantize_transpose_sums(parts, E4M3, 0.3))(parts)
    jax.tree.map(assert_same_bits, got, quantize_transpose_sums(jnp.asarray(x), E4M3, 0.3))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P("data", "model")], ids=str)
def test_sums_are_over_all_shards(spec, axis_type):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    x = np.random.default_rng(0).integers(-3, 4, (32, 16)).astype(ml_dtypes.bfloat16)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        sums = jax.jit(lambda x: quantize_transpose_sums(x, E4M3, 0.3)[3])(placed)
    assert_same_bits(sums, x.astype(np.float32).sum(axis=0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: quantize(jnp.ones(2), jnp.float16, 1.0),
            "dtype must be E4M3 or E5M2, got .*float16.*pass jax_fp8.E4M3",
        ),
        (
            lambda: quantize(jnp.ones(2, jnp.int32), E4M3, 1.0),
            "quantize needs float32, bfloat16 or float16, got int32; cast first",
        ),
        (
            lambda: quantize(jnp.ones(2), E4M3, jnp.ones(2)),
            r"scale must be a scalar, got shape \(2,\); quantize with one scale",
        ),
        (
            lambda: quantize_with_amax(jnp.ones(2), E4M3, ScaleSource.row_of(jnp.ones(3), 3)),
            r"with the row it names, got shape \(3,\) and row 3; pass",
        ),
        (
            lambda: quantize_transpose(jnp.ones((2, 2)), E4M3, ScaleSource.row_of(jnp.ones(3), -1)),
            r"got shape \(3,\) and row -1",
        ),
        (
            lambda: quantize_transpose(jnp.ones((2, 2)), E4M3, ScaleSource.from_amax(jnp.ones((2, 3)), None)),
            r"must be f32\[\] or f32\[r\] with the row it names, got shape \(2, 3\)",
        ),
        (
            lambda: quantize_with_amax(jnp.ones(2, E4M3), E4M3, 1.0),
            "quantize needs float32, bfloat16 or float16, got float8_e4m3fn",
        ),
        (
            lambda: quantize_transpose(jnp.ones(2), E4M3, 1.0),
            r"quantize_transpose needs a matrix, got shape \(2,\); flatten",
        ),
        (
            lambda: quantize_transpose_sums(jnp.ones(2), E4M3, 1.0),
            r"quantize_transpose_sums needs a matrix, got shape \(2,\)",
        ),
        (
            lambda: quantize_transpose(jnp.ones((2, 2, 2)), E4M3, 1.0),
            r"quantize_transpose needs a matrix, got shape \(2, 2, 2\)",
        ),
        (
            lambda: quantize_transpose((jnp.ones((2, 2)),) * 4, E4M3, 1.0),
            "quantize_transpose takes 1 to 3 matrices side by side, got 4",
        ),
        (
            lambda: quantize_transpose((jnp.ones((2, 2)), jnp.ones((3, 2))), E4M3, 1.0),
            r"must have as many rows and the same dtype, got float32\[2, 2\], float32\[3, 2\]",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
