"""Kernels side by side in one FP8 copy: what Adam writes is the cast of its new params, on one device and on shards."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernels.test_adam import BF16, F32, PLAIN, REMAINDER, Kind, coefficients, make_leaf
from reference import assert_same_bits

from jax_fp8.core.cast import LINE, SQUARE, Cast
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair, tiles_of
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.kernels.adam import adam
from jax_fp8.kernels.quantize import quantize_transpose
from jax_fp8.kernels.shared_cast import ColumnPlace, SharedCast, places

ROWS = 64
STEP, QUANTIZE = jax.jit(adam, static_argnums=3), jax.jit(quantize_transpose)
SEED = jnp.uint32(7)
STILL = coefficients(PLAIN), SEED, True


def kernel(width, param=F32, master=None, mu=F32, rows=ROWS, seed=0):
    return make_leaf(Kind((rows, width), BF16, param, master, mu, F32), seed)


def old_pair(width, dtype=E4M3, rows=ROWS):
    values, values_t = jnp.full((rows, width), 7, dtype), jnp.full((width, rows), 6, dtype)
    return Fp8Pair.with_shared_scale(values, values_t, jnp.float32(9), jnp.float32(8))


def expected(leaves, cast):
    """The cast of the params of updated leaves."""
    params = tuple(leaves[number].param for number in cast.leaves)
    return QUANTIZE(params, Cast.with_scale(cast.pair.rowwise.dtype, cast.scale))


def assert_same_pairs(actual, wanted):
    jax.tree.map(assert_same_bits, actual, wanted)


# Two shared casts whose leaves are not in the order of the tree, beside leaves of their own.
LEAVES = [
    kernel(32, BF16, REMAINDER, seed=0),  # key
    kernel(48, BF16, REMAINDER, seed=1),
    kernel(96, BF16, REMAINDER, mu=E4M3, seed=2),  # query
    make_leaf(Kind((48, 32), F32, F32, None, F32, F32, E4M3, 2), 3),
    kernel(16, BF16, REMAINDER, seed=4),  # value
    kernel(80, seed=5),
    kernel(80, seed=6),
]
SHARED = [
    SharedCast(old_pair(144), jnp.float32(0.01), (2, 0, 4)),
    SharedCast(old_pair(160, E5M2), jnp.float32(0.0003), (5, 6)),
]


def test_places():
    shapes = [leaf.gradient.shape for leaf in LEAVES]
    none = ColumnPlace()
    assert places([cast.leaves for cast in SHARED], shapes) == [
        *(ColumnPlace(0, 96), none, ColumnPlace(0, 0), none, ColumnPlace(0, 128), ColumnPlace(1, 0), ColumnPlace(1, 80))
    ]


def test_bits():
    updated, pairs = STEP(LEAVES, coefficients(PLAIN), SEED, True, SHARED)
    alone, none = STEP(LEAVES, coefficients(PLAIN), SEED, True)
    assert_same_pairs(updated, alone)  # nothing else changes
    assert none == []
    for cast, pair in zip(SHARED, pairs, strict=True):
        assert_same_pairs(pair, expected(updated, cast))
        amaxes = [float(reference.amax(updated[number].param)) for number in cast.leaves]
        assert float(pair.amax) == max(amaxes) > min(amaxes)


def test_the_amax_is_that_of_whichever_leaf_has_it():
    """Each of three in turn."""
    for largest in SHARED[0].leaves:
        leaves = list(LEAVES)
        leaves[largest] = replace(leaves[largest], param=100 * leaves[largest].param)
        updated, pairs = STEP(leaves, coefficients(PLAIN), SEED, True, SHARED)
        assert float(pairs[0].amax) == reference.amax(updated[largest].param) > 100


def test_a_step_that_is_not_applied_changes_nothing():
    updated, pairs = STEP(LEAVES, coefficients(PLAIN | {"apply": 0.0}), SEED, True, SHARED)
    assert_same_pairs(updated, LEAVES)
    assert_same_pairs(pairs, [cast.pair for cast in SHARED])


@pytest.mark.parametrize("apply", [1.0, 0.0])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("spec", [("x", None), (None, "x"), ("y", "x"), (None, None)], ids=str)
def test_shards(spec, axis_type, apply):
    """Of rows, which stay where they are; of columns, which are beside others on their device than in the whole."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    leaves, shared = LEAVES[:5], SHARED[:1]
    wanted = STEP(leaves, coefficients(PLAIN | {"apply": apply}), SEED, True, shared)

    def on_mesh(*dims):
        return NamedSharding(mesh, PartitionSpec(*dims))

    def place(tree, dims):
        return jax.tree.map(lambda x: jax.device_put(x, on_mesh(*dims) if x.ndim else on_mesh()), tree)

    sharded = [place(leaf, spec if number in shared[0].leaves else ()) for number, leaf in enumerate(leaves)]
    pair = shared[0].pair
    values, values_t, *scalars = pair.arrays
    values, values_t = place(values, (spec[0],)), place(values_t, (None, spec[0]))
    sharded_cast = replace(shared[0], pair=Fp8Pair.with_shared_scale(values, values_t, *place(scalars, ())))
    with jax.set_mesh(mesh):
        actual = STEP(sharded, coefficients(PLAIN | {"apply": apply}), SEED, True, [sharded_cast])
    assert_same_pairs(jax.device_get(actual), jax.device_get(wanted))
    assert {array.sharding.spec[:1] for array in (actual[1][0].rowwise.values,)} <= {(), (spec[0],), (None,)}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_a_copy_whose_columns_are_split_comes_out_whole(axis_type):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    wanted = STEP(LEAVES, coefficients(PLAIN), SEED, True, SHARED)
    values, values_t, *scalars = SHARED[0].pair.arrays
    values = jax.device_put(values, NamedSharding(mesh, PartitionSpec(None, "x")))
    values_t = jax.device_put(values_t, NamedSharding(mesh, PartitionSpec("x")))
    split = replace(SHARED[0], pair=Fp8Pair.with_shared_scale(values, values_t, *scalars))
    with jax.set_mesh(mesh):
        actual = STEP(LEAVES, coefficients(PLAIN), SEED, True, [split, SHARED[1]])
    assert_same_pairs(jax.device_get(actual), jax.device_get(wanted))


# ---- by tile ---------------------------------------------------------------------------------------------------------

RULES = {
    name: Cast.by_tile(E4M3, SQUARE, formula).rule
    for name, formula in {"exact": ScaleFormula(), "power of two": ScaleFormula(0, 2.0, True)}.items()
}


def pair_by_tile(rows, width):
    def old(*shape):
        return Fp8Array(jnp.full(shape, 7, E4M3), jnp.full(tiles_of(shape, SQUARE), 9.0), SQUARE)

    return Fp8Pair(old(rows, width), old(width, rows), jnp.float32(8))


def tiled(rule, rows=144, widths=(128, 256, 48), dtype=BF16):
    """Leaves from right to left, and after them one of its own copy."""
    master = REMAINDER if dtype == BF16 else None
    leaves = [kernel(width, dtype, master, rows=rows, seed=seed) for seed, width in enumerate(widths[::-1])]
    shared = [SharedCast(pair_by_tile(rows, sum(widths)), None, tuple(range(len(widths)))[::-1], rule)]
    shared += [SharedCast(pair_by_tile(rows, widths[-1]), None, (len(widths),), rule)]
    return [*leaves, kernel(widths[-1], rows=rows, seed=9)], shared


def expected_by_tile(leaves, cast):
    return QUANTIZE(tuple(leaves[number].param for number in cast.leaves), Cast(np.float32(1), cast.rule))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_bits_by_tile(rule):
    leaves, shared = tiled(rule)
    updated, pairs = STEP(leaves, coefficients(PLAIN), SEED, True, shared)
    assert_same_pairs(updated, STEP(leaves, coefficients(PLAIN), SEED, True)[0])
    for cast, pair in zip(shared, pairs, strict=True):
        wanted = expected_by_tile(updated, cast)
        assert_same_pairs(pair, wanted)
        assert jax.tree.structure(pair) == jax.tree.structure(wanted)
        stale = expected_by_tile(leaves, cast)  # negative control
        assert not np.array_equal(stale.rowwise.values, pair.rowwise.values)
    unchanged = STEP(leaves, coefficients(PLAIN | {"apply": 0.0}), SEED, True, shared)
    assert_same_pairs(unchanged, (leaves, [cast.pair for cast in shared]))


def test_a_nan_says_nothing_to_the_scale_of_its_square():
    leaves, shared = tiled(RULES["exact"], widths=(256,), dtype=F32)
    spoiled = replace(leaves[0], param=leaves[0].param.at[5, 130].set(jnp.nan))
    updated, pairs = STEP([spoiled, leaves[1]], coefficients(PLAIN), SEED, True, shared)
    assert_same_pairs(pairs[0], expected_by_tile(updated, shared[0]))
    assert np.isfinite(pairs[0].rowwise.scale).all() and np.isnan(pairs[0].amax)
    assert np.isnan(np.asarray(pairs[0].columnwise.values, np.float32)).sum() == 1


@pytest.mark.parametrize("apply", [1.0, 0.0])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("spec", [("x", None), (None, "x"), ("y", "x")], ids=str)
def test_shards_by_tile(spec, axis_type, apply):
    """Of whole squares. What stands alone stays where it is; what is beside others is gathered along its columns."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    leaves, shared = tiled(RULES["exact"], 256, (256, 512))
    numbers = coefficients(PLAIN | {"apply": apply})
    wanted = STEP(leaves, numbers, SEED, True, shared)

    def place(tree, dims):
        def put(x, *of):
            return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*of)))

        return jax.tree.map(lambda x: put(x, *dims) if x.ndim else put(x), tree)

    def placed(cast):
        rows, columns = spec if len(cast.leaves) == 1 else (spec[0], None)
        pair = Fp8Pair(
            place(cast.pair.rowwise, (rows, columns)), place(cast.pair.columnwise, (columns, rows)), cast.pair.amax
        )
        return replace(cast, pair=pair)

    with jax.set_mesh(mesh):
        actual = STEP(place(leaves, spec), numbers, SEED, True, [*map(placed, shared)])
    assert_same_pairs(jax.device_get(actual), jax.device_get(wanted))


def test_a_mesh_that_cuts_squares_is_refused():
    leaves, shared = tiled(RULES["exact"])
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    split = NamedSharding(mesh, PartitionSpec("x", None))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="each device must hold whole tiles of 128"):
        STEP([jax.tree.map(lambda x: jax.device_put(x, split), leaf) for leaf in leaves], *STILL, shared)


REFUSED = {
    "another order of sizes": (
        {"pair": old_pair(160)},
        r"must have shape \(64, 144\) and both orientations, got \(64, 160\)",
    ),
    "other rows": (
        {"pair": old_pair(144, rows=48)},
        r"must have shape \(64, 144\) and both orientations, got \(48, 144\)",
    ),
    "one orientation": (
        {"pair": replace(old_pair(144), columnwise=None)},
        "both orientations, got .* in one orientation",
    ),
    "kernels of other rows": ({"leaves": (0, 3)}, "no cast of their own"),
    "a kernel twice": ({"leaves": (2, 0, 2)}, "each leaf a place in one cast"),
    "no kernels": ({"leaves": ()}, "must have leaves"),
    "an odd width": ({"leaves": (0, 7)}, "all sizes divisible by 16, got shapes"),
    "a vector": ({"leaves": (0, 8)}, "must be matrices with as many rows"),
    "fewer rows": ({"leaves": (0, 9)}, "must be matrices with as many rows"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    change, sentence = REFUSED[case]
    leaves = [*LEAVES, kernel(24), make_leaf(Kind((64,), F32, F32, None, F32, F32), 0), kernel(32, rows=32)]
    with pytest.raises(ValueError, match=sentence):
        adam(leaves, coefficients(PLAIN), SEED, True, [replace(SHARED[0], **change)])


BY_TILE = {
    "a square of two leaves": ({}, (48, 128), "begin at whole ones where they stand side by side"),
    "other tiles": ({"rule": Cast.by_tile(E4M3, LINE, ScaleFormula()).rule}, (128, 48), "must be cast in squares"),
    "another rule": ({"rule": RULES["power of two"]}, (128, 48), "must be alike"),
    "one scale beside tiles": ({"rule": None}, (128, 48), "must be alike"),
}


@pytest.mark.parametrize("case", BY_TILE)
def test_refusals_by_tile(case):
    change, widths, sentence = BY_TILE[case]
    leaves, (first, second) = tiled(RULES["exact"], widths=widths)
    casts = [replace(first, **change), *([second] if "alike" in sentence else [])]
    with pytest.raises(ValueError, match=sentence):
        adam(leaves, *STILL, casts)


def test_a_mistake_is_noticed():
    """The negative control: the same kernels in another order, and the amax of the last one only."""
    updated, (pair, _) = STEP(LEAVES, coefficients(PLAIN), SEED, True, SHARED)
    other = expected(updated, replace(SHARED[0], leaves=(0, 2, 4)))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(pair.rowwise.values, other.rowwise.values)
    assert float(pair.amax) != float(np.max(np.abs(np.asarray(updated[4].param, np.float32))))
