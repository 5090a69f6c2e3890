"""A scale that the kernel finds itself, one of several or made from an amax, gives the same bits as the scale given outright."""

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

from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.recipe import CurrentScaling, DelayedScaling
from jax_fp8.kernels.quantize import quantize_transpose, quantize_with_amax
from jax_fp8.kernels.scale_source import ScaleSource

SCALE_VECTOR = np.float32([0.3, 2.0**-126, 7.7])
AMAXES = np.float32([0, np.inf, np.nan, 2.0**-126, 448 * 2.0**-126, 1e-4, 0.7, 448, 449, 57344, 3.4e38])
SCALED_BY = {
    "current": (CurrentScaling(), {}),
    "epsilon": (CurrentScaling(amax_epsilon=1e-3), {"amax_epsilon": 1e-3}),
    "power_2": (CurrentScaling(power_2_scale=True), {"power_2_scale": True}),
    "both": (CurrentScaling(power_2_scale=True, amax_epsilon=0.7), {"power_2_scale": True, "amax_epsilon": 0.7}),
}
JIT = [pytest.param(lambda fn: fn, id="eager"), pytest.param(jax.jit, id="jit")]


def normal(*shape) -> np.ndarray:
    return np.asarray(np.random.default_rng(0).normal(size=shape), ml_dtypes.bfloat16)


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
def test_what_the_kernel_is_told(operation, source, told, with_kernels):
    call = jax.jit(lambda x, array: operation(x, E4M3, source(array)))
    lowered = call.trace(jnp.ones((16, 16), jnp.bfloat16), jnp.ones(3)).lower(lowering_platforms=("cuda",)).as_text()
    (attributes,) = re.findall(r"@jax_fp8_quantize.*?mhlo.backend_config = \{(.*?)\}", lowered)
    settings = {
        "row": "0",
        "from_amax": "false",
        "margin": "0",
        "amax_epsilon": "0.000000e+00",
        "power_2_scale": "false",
    }
    assert dict(re.findall(r"(\w+) = ([^ ,]+)", attributes)) == settings | told
