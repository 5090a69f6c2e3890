"""amax is max|x|, exactly, whatever the dtype, the shape and the special values."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.kernels.amax import amax, as_matrix


def normal(shape, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("transform", [pytest.param(lambda fn: fn, id="eager"), pytest.param(jax.jit, id="jit")])
def test_dtypes(dtype, transform):
    x = normal((37, 19), dtype)
    assert_same_bits(transform(amax)(jnp.asarray(x)), reference.amax(x))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 5), (1, 1, 1, 1)])
def test_shapes(shape):
    x = normal(shape)
    assert_same_bits(amax(jnp.asarray(x)), reference.amax(x))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_an_empty_array_has_amax_0(shape):
    assert_same_bits(amax(jnp.zeros(shape)), np.float32(0))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ([1, -3, 2], 3),  # a magnitude
        ([-0.0, 0.0], 0),
        ([1, -np.inf], np.inf),
        ([-3.4028235e38, 1], 3.4028235e38),
        ([2.0**-126], 2.0**-126),
    ],
)
def test_special_values(x, expected):
    assert_same_bits(amax(jnp.float32(x)), np.float32(expected))
    assert_same_bits(reference.amax(np.float32(x)), np.float32(expected))


@pytest.mark.parametrize("x", [[1, np.nan, -2], [np.nan, np.nan], [np.nan, np.inf], [-np.inf, -np.nan]])
def test_a_nan_is_seen(x):
    assert np.isnan(amax(jnp.float32(x))) and np.isnan(reference.amax(np.float32(x)))


@pytest.mark.parametrize("at", [(0, 0), (0, 18), (36, 0), (36, 18)])
def test_every_corner_counts(at):
    x = normal((37, 19))
    x[at] = -50
    assert amax(jnp.asarray(x)) == 50


@pytest.mark.parametrize("largest", [0, 1, 2])
@pytest.mark.parametrize("axis_type", [None, AxisType.Auto, AxisType.Explicit], ids=str)
def test_of_several_arrays_it_is_the_largest(largest, axis_type):
    arrays = [normal((16, 8)), normal((8, 24)), normal((16, 16))]
    arrays[largest].flat[-1] = -50
    if axis_type is None:
        assert amax(*map(jnp.asarray, arrays)) == 50
        return
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        specs = P("data", "model"), P(None, "data"), P()
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        assert jax.jit(amax)(*placed) == 50


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), (1, 1)),
        ((5,), (1, 5)),
        ((4, 5), (4, 5)),
        ((2, 3, 5), (6, 5)),
        ((2, 3, 4, 5), (24, 5)),
        ((0, 5), (0, 5)),
        ((2, 0, 5), (1, 0)),
    ],
)
def test_as_matrix(shape, matrix):
    x = jnp.asarray(normal(shape))
    assert as_matrix(x).shape == matrix
    assert_same_bits(as_matrix(x).ravel(), x.ravel())
