"""Quantizing, bit for bit against NumPy: every bfloat16, every float16, and random bit patterns of float32.

Left out are inputs below 2**-126 in size: they are subnormal in float32, and XLA's CPU compiler flushes them to zero (see ops/quantize.py).
They matter only to scales near 2**-126. Subnormal float16 are normal in float32, and stay in.
"""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3, E5M2, fp8_max
from jax_fp8.core.recipe import CurrentScaling, DelayedScaling
from jax_fp8.ops import dispatch
from jax_fp8.ops.quantize import ScaleSource, quantize, quantize_transpose, quantize_with_amax

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
@pytest.mark.parametrize("transform", [pytest.param(lambda fn: fn, id="eager"), pytest.param(jax.jit, id="jit")])
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
@pytest.mark.parametrize("transform", [pytest.param(lambda fn: fn, id="eager"), pytest.param(jax.jit, id="jit")])
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


# ---- where a scale comes from ----

SCALE_VECTOR = np.float32([0.3, 2.0**-126, 7.7])
AMAXES = np.float32([0, np.inf, np.nan, 2.0**-126, 448 * 2.0**-126, 1e-4, 0.7, 448, 449, 57344, 3.4e38])
SCALED_BY = {
    "current": (CurrentScaling(), {}),
    "epsilon": (CurrentScaling(amax_epsilon=1e-3), {"amax_epsilon": 1e-3}),
    "power_2": (CurrentScaling(power_2_scale=True), {"power_2_scale": True}),
    "both": (CurrentScaling(power_2_scale=True, amax_epsilon=0.7), {"power_2_scale": True, "amax_epsilon": 0.7}),
}
JIT = [pytest.param(lambda fn: fn, id="eager"), pytest.param(jax.jit, id="jit")]


def check_with_source(transform, dtype, source_of, cases):
    """Of each array and the scale to be found in it, both operations hand on what that scale gives, to the last bit."""
    x = normal(16, 32)
    plain = transform(lambda x, array: quantize_with_amax(x, dtype, source_of(array)))
    transposing = transform(lambda x, array: quantize_transpose(x, dtype, source_of(array)))
    for array, scale in cases:
        values, largest = reference.quantize(x, dtype, scale)
        one, one_amax = plain(x, array)
        both, transposed, both_amax = transposing(x, array)
        for quantized, expected in ((one, values), (both, values), (transposed, values.T)):
            assert_same_bits(quantized.values, expected)
            assert_same_bits(quantized.scale, scale)
        assert_same_bits(one_amax, largest)
        assert_same_bits(both_amax, largest)


@pytest.mark.parametrize("transform", JIT)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_of_a_vector_of_scales(row, dtype, transform):
    def source_of(scales):
        return ScaleSource.row_of(scales, row)

    check_with_source(transform, dtype, source_of, [(SCALE_VECTOR, SCALE_VECTOR[row])])
    with pytest.raises(AssertionError, match="elements differ"):  # another row is noticed
        check_with_source(transform, dtype, source_of, [(SCALE_VECTOR, SCALE_VECTOR[row - 1])])


@pytest.mark.parametrize("transform", JIT)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("name", SCALED_BY)
def test_the_scale_of_an_amax(name, dtype, transform):
    recipe, settings = SCALED_BY[name]
    cases = [(amax, reference.current_scale(amax, dtype, **settings)) for amax in AMAXES]
    check_with_source(transform, dtype, lambda amax: ScaleSource.from_amax(amax, recipe), cases)


@pytest.mark.parametrize("margin", [0, 3, -2, 120])
def test_the_scale_of_an_amax_with_a_margin(margin):
    recipe = DelayedScaling(margin=margin)
    cases = [(amax, reference.scale_from_amax(amax, E4M3, margin)) for amax in AMAXES]
    check_with_source(jax.jit, E4M3, lambda amax: ScaleSource.from_amax(amax, recipe), cases)


def test_an_empty_tensor_has_a_scale():
    for source, scale in (
        (ScaleSource.row_of(jnp.asarray(SCALE_VECTOR), 2), SCALE_VECTOR[2]),
        (ScaleSource.from_amax(jnp.float32(0), CurrentScaling()), np.float32(1)),
    ):
        x = jnp.zeros((0, 16), jnp.bfloat16)
        assert_same_bits(quantize_with_amax(x, E4M3, source)[0].scale, scale)
        assert_same_bits(quantize_transpose(x, E4M3, source)[1].scale, scale)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("split", [P(), P("data")], ids=["whole", "split"])
def test_a_row_is_the_same_row_when_the_vector_is_split(axis_type, split):
    """Nobody should split three scales; whoever does gets the same bytes."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(axis_type,))
    x, scales = normal(16, 32), np.float32([0.1, 0.2, 0.3, 0.4])

    def place(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        call = jax.jit(lambda x, scales: quantize_transpose(x, E4M3, ScaleSource.row_of(scales, 3)))
        quantized, transposed, _ = call(place(x, P("data")), place(scales, split))
    values = reference.quantize(x, E4M3, scales[3])[0]
    assert_same_bits(quantized.values, values)
    assert_same_bits(transposed.values, values.T)
    assert_same_bits(quantized.scale, scales[3])


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (lambda a: a[0], {}),
        (lambda a: ScaleSource.row_of(a, 2), {"row": "2"}),
        (
            lambda a: ScaleSource.from_amax(a[0], CurrentScaling(amax_epsilon=0.5, power_2_scale=True)),
            {"from_amax": "true", "amax_epsilon": "5.000000e-01", "power_2_scale": "true"},
        ),
        (lambda a: ScaleSource.from_amax(a[0], DelayedScaling(margin=-3)), {"from_amax": "true", "margin": "-3"}),
    ],
    ids=["scalar", "row", "current", "warm start"],
)
@pytest.mark.parametrize("operation", [quantize_with_amax, quantize_transpose])
def test_what_the_kernel_is_told(operation, source, told, monkeypatch):
    jax.clear_caches()  # what was traced with or without kernels must not be remembered
    monkeypatch.setattr(dispatch, "kernels_run", lambda: True)
    call = jax.jit(lambda x, array: operation(x, E4M3, source(array)))
    lowered = call.trace(jnp.ones((16, 16), jnp.bfloat16), jnp.ones(3)).lower(lowering_platforms=("cuda",)).as_text()
    jax.clear_caches()
    (attributes,) = re.findall(r"@jax_fp8_quantize.*?mhlo.backend_config = \{(.*?)\}", lowered)
    settings = {
        "row": "0",
        "from_amax": "false",
        "margin": "0",
        "amax_epsilon": "0.000000e+00",
        "power_2_scale": "false",
    }
    assert dict(re.findall(r"(\w+) = ([^ ,]+)", attributes)) == settings | told


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
            lambda: quantize_transpose(jnp.ones((2, 2, 2)), E4M3, 1.0),
            r"quantize_transpose needs a matrix, got shape \(2, 2, 2\)",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
