"""What a GEMM asks of its recipe, and recording amaxes:
by maximum, into the rows they belong to, nowhere without a Ref.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3, E5M2, INPUT, KERNEL, OUTPUT_GRADIENT
from jax_fp8.core.fp8_gemm import CAST_STATISTICS, Fp8Gemm, Record
from jax_fp8.core.health import STATISTICS
from jax_fp8.core.recipe import BlockScaling, CurrentScaling, DelayedScaling
from jax_fp8.kernels.quantize import quantize_transpose

pytestmark = pytest.mark.versions

RECIPE = DelayedScaling(amax_history_len=4)


def recorded(start, *records, slot=None):
    """What a Ref that begins as `start` holds after these amaxes were recorded, one after another."""
    ref = jax.new_ref(jnp.asarray(start, jnp.float32))
    for amaxes in records:
        Record(ref, slot).amaxes(jnp.asarray(amaxes, jnp.float32))
    return ref[...]


def test_without_a_ref_nothing_happens():
    assert Record().amaxes(jnp.ones(2)) is None


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
    record = jax.jit(lambda slot, amaxes: Record(ref, slot).amaxes(amaxes))
    record(jnp.int32(1), jnp.float32([1, 2, 3]))
    record(jnp.int32(1), jnp.float32([0.5, 4, 3]))
    assert_same_bits(ref[...], np.float32([[0, 0, 0], [1, 4, 3]]))


def test_only_arrays_are_leaves():
    arrays, treedef = jax.tree.flatten(Fp8Gemm(RECIPE, "block/dense", jnp.ones(3)))
    assert [leaf.shape for leaf in arrays] == [(3,)]
    stateless = Fp8Gemm(CurrentScaling(), "dense")
    assert jax.tree.leaves(stateless) == []
    assert hash(treedef) != hash(jax.tree.structure(stateless))
    assert jax.jit(lambda gemm: gemm)(stateless) == stateless


def not_measured():
    raise AssertionError("a state has the scale")


def test_a_tensor_is_cast_with_its_row_of_the_state():
    gemm = Fp8Gemm(RECIPE, "block/dense", jnp.float32([2, 3, 5]))
    casts = [gemm.cast(tensor, not_measured) for tensor in (INPUT, KERNEL, OUTPUT_GRADIENT)]
    assert [cast.rule.row for cast in casts] == [0, 1, 2]
    assert [cast.rule.dtype for cast in casts] == [E4M3, E4M3, E5M2]
    assert all(cast.source is gemm.scales and cast.rule.formula is None for cast in casts)


@pytest.mark.parametrize("recipe", [RECIPE, CurrentScaling()])
def test_without_scales_a_tensor_is_measured(recipe):
    cast = Fp8Gemm(recipe, "block/dense").cast(OUTPUT_GRADIENT, lambda: jnp.float32(57344))
    assert cast.rule.scale(cast.source) == 1 and cast.rule.dtype == E5M2


def test_the_layer_names_its_gemms():
    gemm = Fp8Gemm(CurrentScaling(split_accumulator=("wgrad",)), "block/mlp/up")
    assert gemm.name == "up"
    assert [gemm.accumulation(which) for which in ("fprop", "dgrad", "wgrad")] == ["fast", "fast", "split"]


@pytest.mark.parametrize("wgrad", ["1d2d", "1d1d"])
def test_orientations_with_other_tiles_are_both_observed(wgrad):
    """A large row has lines of its own, and hurts the others in the tiles of columns."""
    recipe = BlockScaling(wgrad=wgrad)
    dy = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    dy[7] *= 1e5
    pair = jax.jit(lambda dy: quantize_transpose(dy, recipe.cast(OUTPUT_GRADIENT, None, lambda: jnp.float32(1))))(dy)

    def underflowed(pair) -> float:
        def observe(dy, pair):
            record = Record(measured={CAST_STATISTICS: jax.new_ref(jnp.zeros(len(STATISTICS)))})
            return Fp8Gemm(recipe, "layer", record=record).observe(lambda x: (x,), (dy,), pair)

        found = jax.jit(observe)(dy, pair)
        assert found is not None
        return float(found[STATISTICS.index("underflowed")])

    assert underflowed(replace(pair, columnwise=None)) < 0.01 < 0.05 < underflowed(pair) < 0.5
