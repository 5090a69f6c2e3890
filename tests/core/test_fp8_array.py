"""An Fp8Array is its two leaves, and means their product;
a pair is a matrix and its transpose, with one scale or with two.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair, is_fp8

pytestmark = pytest.mark.versions


def every_value(dtype, scale=1.0) -> Fp8Array:
    return Fp8Array(jnp.asarray(np.arange(256, dtype=np.uint8).view(np.dtype(dtype))), jnp.float32(scale))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-100, 7e20])
@pytest.mark.parametrize("result", [jnp.float32, jnp.bfloat16])
def test_dequantize_is_the_product_rounded_to_float32_and_then_once(dtype, scale, result):
    array = every_value(dtype, scale)
    exact = reference.dequantize(array.values, array.scale)  # 4 times 24 bits fit in float64
    expected = exact.astype(np.float32).astype(result)
    number = ~np.isnan(exact)
    for dequantized in (array.dequantize(result), jax.jit(lambda array: array.dequantize(result))(array)):
        assert_same_bits(np.asarray(dequantized)[number], expected[number])
        assert np.isnan(np.asarray(dequantized)[~number]).all()
    assert number.sum() >= 250


def test_dequantize_uses_the_scale():
    array = every_value(E4M3, 0.3)
    with pytest.raises(AssertionError):
        assert_same_bits(np.asarray(array.dequantize())[:127], np.asarray(every_value(E4M3).dequantize())[:127])


def test_shape_and_dtype_are_those_of_the_values():
    array = Fp8Array(jnp.zeros((2, 3), E5M2), jnp.float32(1))
    assert array.shape == (2, 3)
    assert array.dtype == E5M2
    assert array.dequantize().dtype == jnp.float32


def test_the_leaves_of_the_pytree_are_values_and_scale():
    array = every_value(E4M3, 0.5)
    leaves, treedef = jax.tree.flatten(array)
    assert [leaf.dtype for leaf in leaves] == [E4M3, jnp.float32]
    restored = jax.tree.unflatten(treedef, leaves)
    through_jit = jax.jit(lambda array: array)(array)
    for copy in (restored, through_jit):
        assert isinstance(copy, Fp8Array)
        assert_same_bits(copy.values, array.values)
        assert_same_bits(copy.scale, array.scale)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        every_value(E4M3).scale = jnp.float32(2)


# ---- like an array ---------------------------------------------------------------------------------------------------


def tiled() -> Fp8Array:
    """(2, 6) with a scale for every three elements of a row."""
    values = jnp.arange(12, dtype=jnp.float32).reshape(2, 6).astype(E4M3)
    return Fp8Array(values, jnp.array([[1.0, 10.0], [100.0, 0.5]], jnp.float32))


def test_the_shape_of_the_scale_is_its_granularity():
    expected = np.array([[0, 1, 2, 30, 40, 50], [600, 700, 800, 4.5, 5, 5.5]], np.float32)
    np.testing.assert_array_equal(tiled().dequantize(), expected)
    np.testing.assert_array_equal(jax.jit(lambda array: array.dequantize())(tiled()), expected)
    assert tiled().granularity == (1, 3)
    assert every_value(E4M3).granularity == (256,)


@pytest.mark.parametrize("shape", [(2,), (2, 4), (3, 2), (2, 2, 1), (2, 0)])
def test_scales_that_do_not_tile_the_values_are_refused(shape):
    with pytest.raises(ValueError, match=r"must be a scalar, or divide each dim of the values \(2, 6\)"):
        Fp8Array(tiled().values, jnp.ones(shape)).dequantize()


def test_the_last_tile_may_be_cut():
    cut = Fp8Array(jnp.ones((2, 5), E4M3), jnp.float32([[1, 10, 100]] * 2), (1, 2))
    np.testing.assert_array_equal(cut.dequantize(), [[1, 1, 10, 10, 100]] * 2)
    np.testing.assert_array_equal(cut.T.dequantize(), np.transpose([[1, 1, 10, 10, 100]] * 2))
    assert cut.granularity == (1, 2) and jax.tree.map(lambda leaf: leaf, cut).tile == (1, 2)
    with pytest.raises(
        ValueError, match=r"\(2, 5\) with tiles of \(1, 3\) must have scales of shape \(2, 2\), got \(2, 3"
    ):
        Fp8Array(cut.values, cut.scale, (1, 3)).dequantize()


def test_it_has_what_arrays_have():
    array = tiled()
    assert (array.ndim, array.size, array.T.shape, array.T.granularity) == (2, 12, (6, 2), (3, 1))
    np.testing.assert_array_equal(array.T.dequantize(), array.dequantize().T)
    assert is_fp8(array) and not is_fp8(array.values)


def test_numpy_sees_numbers_and_never_objects():
    found = np.asarray(tiled())
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, tiled().dequantize())
    assert np.asarray(tiled(), np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="never without a copy"):
        np.array(tiled(), copy=False)


# ---- pairs -----------------------------------------------------------------------------------------------------------


def pair(shared=True) -> Fp8Pair:
    values, scale = jnp.arange(6, dtype=jnp.float32).reshape(2, 3).astype(E4M3), jnp.float32(0.5)
    if shared:
        return Fp8Pair.with_shared_scale(values, values.T, scale, jnp.float32(2.5))
    return Fp8Pair(Fp8Array(values, scale), Fp8Array(values.T, jnp.float32(2)), jnp.float32(2.5))


def test_a_scale_that_both_share_is_one_leaf():
    assert [leaf.shape for leaf in jax.tree.leaves(pair())] == [(2, 3), (3, 2), (), ()]
    assert len(jax.tree.leaves(pair(shared=False))) == 5
    # A tree may be made of leaves that are one and the same object, as jax does to look at it.
    for given in (pair(), pair(shared=False)):
        structure = jax.tree.structure(given)
        dummy = jax.tree.unflatten(structure, [0] * structure.num_leaves)
        assert jax.tree.structure(dummy) == structure
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(pair())]
    assert paths == [".values", ".values_t", ".scale", ".amax"]


@pytest.mark.parametrize("shared", [True, False])
def test_a_pair_comes_through_transformations_as_it_went_in(shared):
    def check(found, expected):
        assert found.shares_scale == expected.shares_scale == shared
        np.testing.assert_array_equal(found.rowwise.dequantize(), np.arange(6).reshape(2, 3) / 2)
        np.testing.assert_array_equal(found.columnwise.dequantize(), expected.columnwise.dequantize())
        assert float(found.amax) == 2.5

    given = pair(shared)
    check(jax.jit(lambda pair: pair)(given), given)
    check(jax.lax.cond(True, lambda pair: pair, lambda pair: pair, given), given)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), given)
    check(jax.tree.map(lambda leaf: leaf[0], jax.vmap(lambda pair: pair)(stacked)), given)


def test_one_orientation_alone():
    values = jnp.zeros((2, 3), E4M3)
    alone = Fp8Pair.with_shared_scale(values, None, jnp.float32(1), jnp.float32(0))
    assert alone.columnwise is None and not alone.shares_scale
    assert jax.jit(lambda pair: pair)(alone).columnwise is None
    assert alone.arrays[1] is None and alone.arrays[0] is values


def test_a_pair_is_made_of_the_arrays_it_gives():
    again = Fp8Pair.with_shared_scale(*pair().arrays)
    assert again.shares_scale and jax.tree.structure(again) == jax.tree.structure(pair())
