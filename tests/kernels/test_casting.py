"""However a scale is found, the bits are those of the scale given outright; by tile, those of each tile cast alone."""

import functools
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
from emitters import jit_as_for_users
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.kernels.activation import activation_backward_quantize, activation_quantize
from jax_fp8.kernels.activation_functions import activate, activate_backward
from jax_fp8.kernels.casting import NOTHING, ORIENTATIONS, SCALAR, PairResults
from jax_fp8.kernels.dispatch import parse_rule
from jax_fp8.kernels.norm import NormParameters, norm_quantize, normalize
from jax_fp8.kernels.quantize import quantize_rowwise, quantize_transpose, quantize_transpose_sums

SCALE_VECTOR = np.float32([0.3, 2.0**-126, 7.7])
AMAXES = np.float32([0, np.inf, np.nan, 2.0**-126, 448 * 2.0**-126, 1e-4, 0.7, 448, 449, 57344, 3.4e38])
SCALED_BY = {
    "current": {},
    "epsilon": {"amax_epsilon": 1e-3},
    "power_2": {"power_2_scale": True},
    "both": {"power_2_scale": True, "amax_epsilon": 0.7},
}
EAGER, FAST, SLOW = lambda fn: fn, (), pytest.mark.slow
JIT = [pytest.param(EAGER, id="eager"), pytest.param(jax.jit, id="jit")]


@dataclass(frozen=True)
class PowerOfFour:
    """A formula that no kernel knows: the amax itself, rounded up to a power of four."""

    def __call__(self, amax, dtype):
        return jnp.ldexp(jnp.ones_like(amax), 2 * ((jnp.frexp(amax)[1] + 1) // 2))


def normal(*shape) -> np.ndarray:
    return np.asarray(np.random.default_rng(0).normal(size=shape), ml_dtypes.bfloat16)


def check_with_source(transform, dtype, cast_of, cases):
    """Of each array and the scale to be found in it, both operations hand on what that scale gives, to the last bit."""
    x = normal(16, 32)
    plain = transform(lambda x, array: quantize_rowwise(x, cast_of(array)))
    transposing = transform(lambda x, array: quantize_transpose(x, cast_of(array)))
    for array, scale in cases:
        values, largest = reference.quantize(x, dtype, scale)
        one, both = plain(x, array), transposing(x, array)
        assert one.columnwise is None
        for quantized, expected in ((one.rowwise, values), (both.rowwise, values), (both.columnwise, values.T)):
            assert_same_bits(quantized.values, expected)
            assert_same_bits(quantized.scale, scale)
        jax.tree.map(assert_same_bits, (one.amax, both.amax), (largest, largest))


@pytest.mark.parametrize("transform", JIT)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_of_a_vector_of_scales(row, dtype, transform):
    cast_of = lambda scales: Cast.with_row(dtype, scales, row)  # noqa: E731
    check_with_source(transform, dtype, cast_of, [(SCALE_VECTOR, SCALE_VECTOR[row])])
    with pytest.raises(AssertionError, match="elements differ"):  # another row is noticed
        check_with_source(transform, dtype, cast_of, [(SCALE_VECTOR, SCALE_VECTOR[row - 1])])


@pytest.mark.parametrize("transform", JIT)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("name", SCALED_BY)
def test_the_scale_of_an_amax(name, dtype, transform):
    settings = SCALED_BY[name]
    cases = [(amax, reference.current_scale(amax, dtype, **settings)) for amax in AMAXES]
    check_with_source(transform, dtype, lambda amax: Cast.from_amax(dtype, amax, ScaleFormula(**settings)), cases)


@pytest.mark.parametrize("margin", [0, 3, -2, 120])
def test_the_scale_of_an_amax_with_a_margin(margin):
    cases = [(amax, reference.scale_from_amax(amax, E4M3, margin)) for amax in AMAXES]
    check_with_source(jax.jit, E4M3, lambda amax: Cast.from_amax(E4M3, amax, ScaleFormula(margin=margin)), cases)


@pytest.mark.parametrize("transform", JIT)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_scale_of_a_formula_that_kernels_do_not_know(dtype, transform):
    cases = [(np.float32(amax), np.float32(scale)) for amax, scale in ((0.7, 1), (1.5, 4), (4.5, 16), (300, 1024))]
    check_with_source(transform, dtype, lambda amax: Cast.from_amax(dtype, amax, PowerOfFour()), cases)
    lowest = [(np.float32(amax), np.float32(amax)) for amax in (0.5, 8)]
    check_with_source(transform, dtype, lambda amax: Cast.from_amax(dtype, amax, lambda amax, dtype: amax), lowest)


def test_an_empty_tensor_has_a_scale():
    for cast, scale in (
        (Cast.with_row(E4M3, jnp.asarray(SCALE_VECTOR), 2), SCALE_VECTOR[2]),
        (Cast.from_amax(E4M3, jnp.float32(0), ScaleFormula()), np.float32(1)),
    ):
        x = jnp.zeros((0, 16), jnp.bfloat16)
        assert_same_bits(quantize_rowwise(x, cast).rowwise.scale, scale)
        assert_same_bits(quantize_transpose(x, cast).columnwise.scale, scale)


def make_mesh(axis_type, devices=2) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(axis_type,))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("split", [P(), P("data")], ids=["whole", "split"])
def test_a_row_is_the_same_row_when_the_vector_is_split(axis_type, split):
    """Nobody should split three scales; whoever does gets the same bytes."""
    mesh = make_mesh(axis_type)
    x, scales = normal(16, 32), np.float32([0.1, 0.2, 0.3, 0.4])

    with jax.set_mesh(mesh):
        call = jax.jit(lambda x, scales: quantize_transpose(x, Cast.with_row(E4M3, scales, 3)))
        pair = call(*jax.device_put((x, scales), (NamedSharding(mesh, P("data")), NamedSharding(mesh, split))))
    values = reference.quantize(x, E4M3, scales[3])[0]
    assert_same_bits(pair.rowwise.values, values)
    assert_same_bits(pair.columnwise.values, values.T)
    assert_same_bits(pair.rowwise.scale, scales[3])


OF_CURRENT = {"from_amax": "true", "amax_epsilon": "5.000000e-01", "power_2_scale": "true"}


@pytest.mark.parametrize(
    ("cast_of", "told"),
    [
        (lambda a: Cast.with_scale(E4M3, a[0]), {}),
        (lambda a: Cast.with_row(E4M3, a, 2), {"row": "2"}),
        (lambda a: Cast.from_amax(E4M3, a[0], ScaleFormula(amax_epsilon=0.5, power_2_scale=True)), OF_CURRENT),
        (lambda a: Cast.from_amax(E4M3, a[0], ScaleFormula(margin=-3)), {"from_amax": "true", "margin": "-3"}),
        (lambda a: Cast.from_amax(E4M3, a[0], PowerOfFour()), {}),
    ],
    ids=["scalar", "row", "current", "warm start", "unknown formula"],
)
@pytest.mark.parametrize("operation", [quantize_rowwise, quantize_transpose])
def test_what_the_kernel_is_told(operation, cast_of, told, with_kernels):
    call = jax.jit(lambda x, array: operation(x, cast_of(array)))
    lowered = call.trace(jnp.ones((16, 16), jnp.bfloat16), jnp.ones(3)).lower(lowering_platforms=("cuda",)).as_text()
    (attributes,) = re.findall(r"@jax_fp8_quantize.*?mhlo.backend_config = \{(.*?)\}", lowered)
    flags = dict.fromkeys(("from_amax", "power_2_scale"), "false")
    settings = {"row": "0", "margin": "0", "amax_epsilon": "0.000000e+00", **flags}
    assert dict(re.findall(r"(\w+) = ([^ ,]+)", attributes)) == settings | told


@pytest.mark.parametrize("orientations", ORIENTATIONS)
def test_what_is_wanted_keeps_its_place(orientations):
    matrix = jnp.arange(6, dtype=jnp.float32).reshape(2, 3).astype(E5M2)
    results = PairResults(Cast.with_scale(E5M2, 1).rule, orientations)
    *shapes, amax, scale = results.shapes(matrix.shape)
    assert amax == scale == SCALAR
    arrays = results.from_kernel((matrix, matrix.T, jnp.float32(7), jnp.float32(2)), {})
    assert parse_rule(f" -> {results.dims('m n', 'n m')}")[1] == [*results.wanted(["m", "n"], ["n", "m"]), [], []]
    pair = results.pair(arrays)
    assert_same_bits(pair.amax, np.float32(7))
    places = (pair.rowwise, pair.columnwise), (matrix, matrix.T)
    for form, shape, array, expected in zip(("rowwise", "columnwise"), shapes, *places, strict=True):
        assert shape.dtype == E5M2
        if orientations in ("both", form):
            assert shape.shape == expected.shape
            assert_same_bits(array.values, expected)
            assert_same_bits(array.scale, np.float32(2))
        else:
            assert shape.shape == NOTHING and array is None


# ---- by tile ---------------------------------------------------------------------------------------------------------

TILES = {(1, 128): (128, 256), (128, 128): (256, 128), (1, 16): (32, 48), (4, 8): (32, 48)}  # of matrices so large
BOTH_DTYPES = pytest.mark.parametrize(
    ("transform", "dtype"),
    [
        pytest.param(transform, dtype, id=f"{name}-{np.dtype(dtype)}", marks=marks)
        for name, transform, of_e4m3, of_e5m2 in (("eager", EAGER, FAST, SLOW), ("jit", jit_as_for_users, SLOW, FAST))
        for dtype, marks in ((E4M3, of_e4m3), (E5M2, of_e5m2))
    ],
)
NORM = NormParameters(jnp.asarray(normal(64), jnp.float32) + 1, jnp.asarray(normal(64), jnp.float32))
EPSILON, BY_TILE = 1e-3, Cast.by_tile(E4M3, (1, 16), ScaleFormula())
# What is made of x (m, n) and of a gradient dy, in one pass and in two.
PRODUCERS = {
    "quantize_transpose": (lambda x, dy, cast: quantize_transpose(x, cast), lambda x, dy: x),
    "quantize_transpose_sums": (lambda x, dy, cast: quantize_transpose_sums(x, cast)[0], lambda x, dy: x),
    "norm_quantize": (lambda x, dy, cast: norm_quantize(x, NORM, EPSILON, cast)[0],
                      lambda x, dy: normalize(x, NORM, EPSILON, x.dtype)[0]),
    "gelu": (lambda x, dy, cast: activation_quantize(x, "gelu", cast), lambda x, dy: activate(x, "gelu")),
    "swiglu": (lambda x, dy, cast: activation_quantize(x, "swiglu", cast), lambda x, dy: activate(x, "swiglu")),
    "gradient of gelu": (
        lambda x, dy, cast: activation_backward_quantize(dy, x, "gelu", cast, cast)[0],
        lambda x, dy: activate_backward(dy, x, "gelu"),
    ),
    "gradient of swiglu": (
        lambda x, dy, cast: activation_backward_quantize(dy, x, "swiglu", cast, cast)[0],
        lambda x, dy: activate_backward(dy, x, "swiglu"),
    ),
}  # fmt: skip


@functools.cache
def by_tile(name):
    """A program, and what it returns on one device."""
    program = jax.jit(lambda x, dy: PRODUCERS[name][0](x, dy, BY_TILE))
    return program, jax.device_get(program(*operands(name)))


def operands(name) -> tuple[np.ndarray, np.ndarray]:
    return uneven(32, 64), uneven(32, 32 if name == "gradient of swiglu" else 64, seed=1)


def uneven(*shape, seed=0) -> np.ndarray:
    """Of many sizes, so that no two tiles have the same scale."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp2(rng.integers(-6, 7, shape))).astype(ml_dtypes.bfloat16)


def assert_cast_by_tile(pair, x, *how):
    x = np.asarray(x)
    for array, matrix in ((pair.rowwise, x), (pair.columnwise, x.T)):
        if array is not None:
            values, scales = reference.quantize_by_tile(matrix, *how)
            assert_same_bits(array.scale, scales)
            assert_same_bits(array.values, values)
    assert_same_bits(pair.amax, reference.amax(x))


@pytest.mark.parametrize("tile", TILES, ids=str)
@BOTH_DTYPES
def test_by_tile(tile, dtype, transform):
    x = uneven(*TILES[tile])
    x[0, 0], x[5, 20], x[9] = np.nan, -np.inf, 0
    cast = Cast.by_tile(dtype, tile, ScaleFormula())
    both = transform(lambda x: quantize_transpose(x, cast))(jnp.asarray(x))
    assert_cast_by_tile(both, x, dtype, tile)
    assert (both.rowwise.granularity, both.columnwise.granularity) == (tile, tile)
    one = transform(lambda x: quantize_rowwise(x, cast))(jnp.asarray(x))
    assert one.columnwise is None
    jax.tree.map(assert_same_bits, (one.rowwise, one.amax), (both.rowwise, both.amax))
    for other in (reference.quantize(x, dtype, 1)[0], *([both.columnwise.T.values] if tile[0] != tile[1] else [])):
        with pytest.raises(AssertionError, match="elements differ"):  # tiles of columns are not those of rows
            assert_same_bits(both.rowwise.values, other)


@pytest.mark.parametrize("name", PRODUCERS)
@BOTH_DTYPES
def test_every_producer_by_tile(name, dtype, transform):
    fused, make = PRODUCERS[name]
    x, dy = map(jnp.asarray, operands(name))
    made = jax.jit(make)(x, dy)
    cast = Cast.by_tile(dtype, (1, 16), ScaleFormula(power_2_scale=True))
    pair = transform(lambda x, dy: fused(x, dy, cast))(x, dy)
    scale_of = lambda amax, dtype: reference.current_scale(amax, dtype, power_2_scale=True)  # noqa: E731
    assert_cast_by_tile(pair, made, dtype, (1, 16), scale_of)


@pytest.mark.parametrize("name", PRODUCERS)
def test_every_producer_with_a_formula_that_kernels_do_not_know(name):
    x, dy = operands(name)
    given, found = Cast.with_scale(E4M3, 16), Cast.from_amax(E4M3, jnp.float32(5), PowerOfFour())
    fused = jax.jit(PRODUCERS[name][0])
    jax.tree.map(assert_same_bits, fused(x, dy, found), fused(x, dy, given))
    tiles = Cast.by_tile(E4M3, (4, 8), PowerOfFour())
    made = jax.jit(PRODUCERS[name][1])(x, dy)
    scale_of = lambda amax, dtype: np.float32(4.0 ** ((np.frexp(amax)[1] + 1) // 2))  # noqa: E731
    assert_cast_by_tile(fused(x, dy, tiles), made, E4M3, (4, 8), scale_of)


PLACES = [(AxisType.Auto, spec) for spec in (P(), P("data"), P(None, "data"))] + [(AxisType.Explicit, P())]


@pytest.mark.parametrize(("axis_type", "spec"), PLACES, ids=str)
@pytest.mark.parametrize("name", PRODUCERS)
def test_by_tile_on_a_mesh(name, axis_type, spec):
    """The reference is all there is, and where axes are Auto the compiler splits it."""
    (call, alone), mesh = by_tile(name), make_mesh(axis_type)
    with jax.set_mesh(mesh):
        pair = call(*(jax.device_put(array, NamedSharding(mesh, spec)) for array in operands(name)))
    jax.tree.map(assert_same_bits, pair, alone)


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
@pytest.mark.parametrize("name", PRODUCERS)
def test_by_tile_an_explicit_axis_may_split_whole_tiles(name, spec):
    (call, alone), mesh = by_tile(name), make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = [jax.device_put(array, NamedSharding(mesh, spec)) for array in operands(name)]
        if name == "gradient of swiglu" and spec == P(None, "data"):
            with pytest.raises(ValueError, match=r"swiglu cast by tile needs all columns on each device, got .*'data'"):
                call(*args)
            return
        jax.tree.map(assert_same_bits, call(*args), alone)
        if name == "norm_quantize" and spec == P(None, "data"):  # it gathers the features anyway
            return
        cut = Cast.by_tile(E4M3, (32, 64), ScaleFormula())
        with pytest.raises(ValueError, match=r"must hold whole tiles of 32 x 64 of a matrix .*; use other sizes"):
            jax.eval_shape(lambda *args: PRODUCERS[name][0](*args, cut), *args)


def test_by_tile_a_shard_of_somebodys_own():
    mesh, x = make_mesh(AxisType.Auto), uneven(32, 64)
    cast = lambda x: (lambda pair: (pair.rowwise, pair.columnwise))(quantize_transpose(x, BY_TILE))  # noqa: E731
    shards = jax.jit(jax.shard_map(cast, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P(None, "data"))))
    alone = quantize_transpose(x, BY_TILE)
    jax.tree.map(assert_same_bits, shards(x), (alone.rowwise, alone.columnwise))


@pytest.mark.parametrize("shape", [(24, 40), (1, 1), (17, 3), (0, 16), (32, 0)], ids=str)
@pytest.mark.parametrize("tiles", [((1, 16), (1, 16)), ((4, 8), (4, 8)), ((1, 16), (16, 16))], ids=str)
def test_tiles_are_cut_where_the_matrix_ends(tiles, shape):
    x = uneven(*shape)
    pair = jax.jit(lambda x: quantize_transpose(x, Cast.by_tile(E4M3, tiles[0], ScaleFormula(), tiles[1])))(x)
    for array, matrix, tile in ((pair.rowwise, x, tiles[0]), (pair.columnwise, x.T, tiles[1])):
        values, scales = reference.quantize_by_tile(matrix, E4M3, tile)
        assert_same_bits(array.values, values)
        assert_same_bits(array.scale, scales)


@pytest.mark.parametrize("shape", [(64,), (2, 4, 64)])
def test_scales_by_tile_are_those_of_a_matrix(shape):
    with pytest.raises(ValueError, match=r"scales by tile need a matrix, got shape .*; flatten the leading dims"):
        quantize_rowwise(jnp.ones(shape), BY_TILE)
