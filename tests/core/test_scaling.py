"""Recording amaxes: by maximum, into the rows they belong to, and nowhere without a Ref."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_same_bits

from jax_fp8.core.recipe import CurrentScaling, DelayedScaling
from jax_fp8.core.scaling import GemmScaling

pytestmark = pytest.mark.versions

RECIPE = DelayedScaling(amax_history_len=4)


def scaling(amax_ref=None, slot=None) -> GemmScaling:
    return GemmScaling(RECIPE, "block/dense", from_current=False, scale=jnp.ones(3), amax_ref=amax_ref, slot=slot)


def recorded(start, *records, slot=None):
    """What a Ref that begins as `start` holds after these amaxes were recorded, one after another."""
    ref = jax.new_ref(jnp.asarray(start, jnp.float32))
    for amaxes in records:
        scaling(ref, slot).record(jnp.asarray(amaxes, jnp.float32))
    return ref[...]


def test_without_a_ref_nothing_happens():
    assert scaling().record(jnp.ones(2)) is None


def test_a_forward_pass_records_the_first_two_rows_and_a_backward_pass_all():
    assert_same_bits(recorded([0, 0, 0], [1, 2]), np.float32([1, 2, 0]))
    assert_same_bits(recorded([0, 0, 0], [1, 2, 3]), np.float32([1, 2, 3]))


def test_the_maximum_is_kept_not_the_last_nor_the_sum():
    assert_same_bits(recorded([0, 0, 7], [1, 5, 3], [4, 2]), np.float32([4, 5, 7]))


def test_recording_twice_is_recording_once():
    assert_same_bits(recorded([0, 0, 0], [1, 2, 3]), recorded([0, 0, 0], [1, 2, 3], [1, 2, 3]))


def test_infinity_is_recorded():
    assert_same_bits(recorded([0, 0, 0], [1, 2, np.inf]), np.float32([1, 2, np.inf]))


def test_a_slot_is_a_row_of_a_shared_ref():
    actual = recorded(np.zeros((3, 3)), [1, 2], [0.5, 0.5, 3], slot=jnp.int32(1))
    assert_same_bits(actual, np.float32([[0, 0, 0], [1, 2, 3], [0, 0, 0]]))


def test_in_jit_with_a_traced_slot():
    ref = jax.new_ref(jnp.zeros((2, 3)))
    record = jax.jit(lambda slot, amaxes: scaling(ref, slot).record(amaxes))
    record(jnp.int32(1), jnp.float32([1, 2, 3]))
    record(jnp.int32(1), jnp.float32([0.5, 4, 3]))
    assert_same_bits(ref[...], np.float32([[0, 0, 0], [1, 4, 3]]))


def test_only_arrays_are_leaves():
    arrays, treedef = jax.tree.flatten(scaling())
    assert [leaf.shape for leaf in arrays] == [(3,)]
    stateless = GemmScaling(CurrentScaling(), "dense", from_current=True)
    assert jax.tree.leaves(stateless) == []
    assert hash(treedef) != hash(jax.tree.structure(stateless))
    assert jax.jit(lambda scaling: scaling)(stateless) == stateless
