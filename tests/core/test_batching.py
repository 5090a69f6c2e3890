"""Amaxes of a batch: their maximum where what they are recorded in is shared, their own where it is mapped, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8.core.batching import shared_amaxes

pytestmark = pytest.mark.versions

AMAXES = jnp.asarray(np.random.default_rng(0).permutation(24).reshape(2, 4, 3), jnp.float32)
SHARED, OWN = jnp.zeros(3), jnp.zeros((2, 3))


def test_without_vmap_it_does_nothing():
    np.testing.assert_array_equal(shared_amaxes(SHARED, AMAXES[0, 0]), AMAXES[0, 0])


def test_a_batch_leaves_its_maximum_once():
    maximum = jax.jit(jax.vmap(shared_amaxes, in_axes=(None, 0), out_axes=None))(SHARED, AMAXES[0])
    np.testing.assert_array_equal(maximum, AMAXES[0].max(axis=0))
    assert np.any(maximum != AMAXES[0, 0])


def test_what_is_mapped_keeps_its_own():
    own = jax.vmap(shared_amaxes)(OWN, AMAXES[:, 0])
    np.testing.assert_array_equal(own, AMAXES[:, 0])
    np.testing.assert_array_equal(jax.vmap(shared_amaxes, in_axes=(0, None))(OWN, AMAXES[0, 0]), AMAXES[[0, 0], 0])


def test_maps_inside_each_other_ask_each_for_itself():
    """Two runs with a state each, and in each a batch; and the other way round."""
    batch = jax.vmap(shared_amaxes, in_axes=(None, 0), out_axes=None)
    np.testing.assert_array_equal(jax.vmap(batch)(OWN, AMAXES), AMAXES.max(axis=1))
    runs = jax.vmap(shared_amaxes)
    swapped = jax.vmap(runs, in_axes=(None, 0), out_axes=None)(OWN, jnp.swapaxes(AMAXES, 0, 1))
    np.testing.assert_array_equal(swapped, AMAXES.max(axis=1))
    both = jax.vmap(batch, in_axes=(None, 0), out_axes=None)(SHARED, AMAXES)
    np.testing.assert_array_equal(both, AMAXES.max(axis=(0, 1)))
