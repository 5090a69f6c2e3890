"""Kernels side by side in one FP8 copy: what Adam writes is the cast of its new params, on one device and on shards."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernels.test_adam import BF16, F32, PLAIN, REMAINDER, Kind, coefficients, make_leaf
from reference import assert_same_bits

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.kernels.adam import adam
from jax_fp8.kernels.quantize import quantize_transpose
from jax_fp8.kernels.shared_cast import Place, SharedCast, places

ROWS = 64
STEP = jax.jit(adam, static_argnums=3)
SEED = jnp.uint32(7)


def kernel(width, param=F32, master=None, mu=F32, rows=ROWS, seed=0):
    return make_leaf(Kind((rows, width), BF16, param, master, mu, F32), seed)


def old_pair(width, dtype=E4M3, rows=ROWS):
    values, values_t = jnp.full((rows, width), 7, dtype), jnp.full((width, rows), 6, dtype)
    return Fp8Pair.of(values, values_t, jnp.float32(9), jnp.float32(8))


def expected(leaves, cast):
    """The cast of the params of updated leaves."""
    params = tuple(leaves[number].param for number in cast.leaves)
    return quantize_transpose(params, Cast.with_scale(cast.pair.rowwise.dtype, cast.scale))


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
    none = Place()
    assert places([cast.leaves for cast in SHARED], shapes) == [
        *(Place(0, 96), none, Place(0, 0), none, Place(0, 128), Place(1, 0), Place(1, 80))
    ]


def test_bits():
    updated, pairs = STEP(LEAVES, coefficients(PLAIN), SEED, True, SHARED)
    alone, none = STEP(LEAVES, coefficients(PLAIN), SEED, True)
    assert_same_pairs(updated, alone)  # nothing else changes
    assert none == []
    for cast, pair in zip(SHARED, pairs, strict=True):
        assert_same_pairs(pair, expected(updated, cast))
        amaxes = [float(jnp.max(jnp.abs(updated[number].param.astype(F32)))) for number in cast.leaves]
        assert float(pair.amax) == max(amaxes) > min(amaxes)


def test_the_amax_is_that_of_whichever_leaf_has_it():
    """Each of three in turn."""
    for largest in SHARED[0].leaves:
        leaves = list(LEAVES)
        leaves[largest] = replace(leaves[largest], param=100 * leaves[largest].param)
        updated, pairs = STEP(leaves, coefficients(PLAIN), SEED, True, SHARED)
        assert float(pairs[0].amax) == float(jnp.max(jnp.abs(updated[largest].param.astype(F32)))) > 100


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
    sharded_cast = replace(shared[0], pair=Fp8Pair.of(values, values_t, *place(scalars, ())))
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
    split = replace(SHARED[0], pair=Fp8Pair.of(values, values_t, *scalars))
    with jax.set_mesh(mesh):
        actual = STEP(LEAVES, coefficients(PLAIN), SEED, True, [split, SHARED[1]])
    assert_same_pairs(jax.device_get(actual), jax.device_get(wanted))


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


def test_a_mistake_is_noticed():
    """The negative control: the same kernels in another order, and the amax of the last one only."""
    updated, (pair, _) = STEP(LEAVES, coefficients(PLAIN), SEED, True, SHARED)
    other = expected(updated, replace(SHARED[0], leaves=(0, 2, 4)))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(pair.rowwise.values, other.rowwise.values)
    assert float(pair.amax) != float(np.max(np.abs(np.asarray(updated[4].param, np.float32))))
