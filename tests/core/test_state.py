"""The one update per optimizer step, against the oracle: every row of every GEMM, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3, Format
from jax_fp8.core.recipe import CurrentScaling, DelayedScaling
from jax_fp8.core.state import (
    INPUT,
    KERNEL,
    OUTPUT_GRADIENT,
    count_nonfinite,
    gemm_states,
    initial_state,
    keep_known_rows,
    map_gemms,
    stage,
    update_state,
)

RECIPES = {
    "max": DelayedScaling(amax_history_len=5),
    "most_recent": DelayedScaling(amax_history_len=5, amax_compute_algo="most_recent"),
    "margin": DelayedScaling(amax_history_len=5, margin=3),
    "one_step": DelayedScaling(amax_history_len=1),
    "e4m3": DelayedScaling(amax_history_len=5, fp8_format=Format(forward=E4M3, backward=E4M3)),
}
# A GEMM of its own, three stacked by a scan, and 2 x 2 by two scans. Not in alphabetical order: jit sorts the keys of a dict.
STACKED = {"top": (), "layers": (3,), "nested": (2, 2)}


def random_amaxes(rng, shape) -> np.ndarray:
    return np.exp2(rng.uniform(-60, 60, shape)).astype(np.float32)


def random_staged(rng, shape) -> np.ndarray:
    """Amaxes of a step in which some tensors did not run and some were not finite."""
    special = rng.choice(np.float32([0, np.inf, np.nan]), shape)
    return np.where(rng.random(shape) < 0.4, special, random_amaxes(rng, shape))


def collection(leaves) -> dict:
    """The GEMMs of `STACKED`, at two depths."""
    return {"top": leaves("top"), "block": {"nested": leaves("nested"), "layers": leaves("layers")}}


def random_state(rng, recipe) -> dict:
    def leaves(name):
        shape = (*STACKED[name], 3)
        history = random_amaxes(rng, (*shape, recipe.amax_history_len))
        history[..., 0] = 0
        return {"scale": jnp.asarray(random_amaxes(rng, shape)), "amax_history": jnp.asarray(history)}

    return collection(leaves)


def stage_random(rng, state) -> dict:
    def leaves(gemm):
        history = np.array(gemm["amax_history"])
        history[..., 0] = random_staged(rng, history.shape[:-1])
        return {**gemm, "amax_history": jnp.asarray(history)}

    return map_gemms(leaves, state)


def oracle(state, recipe, **settings) -> dict:
    """`reference.update_state` of every GEMM of a collection, one at a time."""
    dtypes = [recipe.fp8_format.forward, recipe.fp8_format.forward, recipe.fp8_format.backward]
    settings = {"margin": recipe.margin, "algorithm": recipe.amax_compute_algo, **settings}

    def leaves(gemm):
        scale, history = np.array(gemm["scale"]), np.array(gemm["amax_history"])
        for index in np.ndindex(scale.shape[:-1]):
            scale[index], history[index] = reference.update_state(scale[index], history[index], dtypes, **settings)
        return {"scale": scale, "amax_history": history}

    return map_gemms(leaves, state)


def assert_same_state(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(assert_same_bits, actual, expected)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_update_state_is_the_oracle_step_after_step(recipe):
    rng = np.random.default_rng(0)
    state = random_state(rng, recipe)
    jitted = jax.jit(lambda state: update_state(state, recipe))
    for _ in range(6):  # longer than the history
        staged = stage_random(rng, state)
        state = update_state(staged, recipe)
        assert_same_state(state, oracle(staged, recipe))
        assert_same_state(jitted(staged), state)


@pytest.mark.parametrize("wrong", [{"margin": 1}, {"algorithm": "most_recent"}])
def test_a_wrong_update_would_be_noticed(wrong):
    recipe = RECIPES["max"]
    staged = stage_random(np.random.default_rng(0), random_state(np.random.default_rng(1), recipe))
    with pytest.raises(AssertionError):
        assert_same_state(update_state(staged, recipe), oracle(staged, recipe, **wrong))


def one_gemm(*history, scale=(2.0, 3.0, 4.0)) -> dict:
    """A collection of one GEMM whose rows have the same history."""
    return {"dense": {"scale": jnp.float32(scale), "amax_history": jnp.tile(jnp.float32(history), (3, 1))}}


def test_the_staged_amax_becomes_the_newest_and_the_oldest_is_dropped():
    recipe = DelayedScaling(amax_history_len=4)
    updated = update_state(one_gemm(5, 9, 1, 2), recipe)["dense"]  # staged 5; oldest 9, newest 2
    assert_same_bits(updated["amax_history"][INPUT], np.float32([0, 1, 2, 5]))
    assert_same_bits(updated["scale"], np.float32([9 / 448, 9 / 448, 9 / 57344]))
    again = update_state(one_gemm(3, *updated["amax_history"][INPUT][1:]), recipe)["dense"]
    assert_same_bits(again["scale"], np.float32([5 / 448, 5 / 448, 5 / 57344]))  # the 9 is forgotten


@pytest.mark.parametrize("staged", [0, np.inf, np.nan])
def test_a_row_that_did_not_run_is_left_exactly_as_it_was(staged):
    before = one_gemm(0, 9, 1, 2)
    recipe = DelayedScaling(amax_history_len=4)
    assert_same_state(update_state(one_gemm(staged, 9, 1, 2), recipe), before)
    with pytest.raises(AssertionError):  # one that ran is not
        assert_same_state(update_state(one_gemm(5, 9, 1, 2), recipe), before)


def test_rows_do_not_wait_for_each_other():
    state = one_gemm(0, 9, 1, 2)
    state["dense"]["amax_history"] = state["dense"]["amax_history"].at[KERNEL, 0].set(7)
    updated = update_state(state, DelayedScaling(amax_history_len=4))["dense"]
    assert_same_bits(updated["scale"], np.float32([2, 9 / 448, 4]))
    assert_same_bits(updated["amax_history"], np.float32([[0, 9, 1, 2], [0, 1, 2, 7], [0, 9, 1, 2]]))


@pytest.mark.parametrize("recipe", [None, CurrentScaling(), DelayedScaling()])
def test_no_state_stays_no_state(recipe):
    assert update_state({}, recipe) == {}


@pytest.mark.parametrize("recipe", [None, CurrentScaling()])
def test_state_without_its_recipe_is_refused(recipe):
    with pytest.raises(ValueError, match="amax histories needs the DelayedScaling recipe it was made for, got recipe="):
        update_state(one_gemm(0, 1), recipe)


def test_another_history_length_is_refused():
    with pytest.raises(
        ValueError,
        match=r"recipe's amax_history_len=8, got lengths \[2\]; pass the recipe that the model was made with",
    ):
        update_state(one_gemm(0, 1), DelayedScaling(amax_history_len=8))


def test_initial_state_knows_the_kernel_and_nothing_else():
    state = initial_state(DelayedScaling(amax_history_len=6, margin=1), jnp.float32(0.7))
    kernel_scale = reference.scale_from_amax(np.float32(0.7), E4M3, margin=1)
    assert_same_bits(state["scale"], np.float32([1, kernel_scale, 1]))
    assert_same_bits(state["amax_history"], np.zeros((3, 6), np.float32))


def test_initial_state_of_a_kernel_of_zeros():
    assert_same_bits(initial_state(DelayedScaling(), jnp.float32(0))["scale"], np.float32([1, 1, 1]))


def test_stage_takes_the_maximum_of_the_first_rows():
    history = jnp.asarray(random_amaxes(np.random.default_rng(0), (2, 3, 4)))
    amaxes = jnp.float32([[0, np.inf], [1e30, 0]])
    expected = np.array(history)
    expected[:, :2, 0] = np.maximum(expected[:, :2, 0], amaxes)
    staged = stage(history, amaxes)
    assert_same_bits(staged, expected)
    assert_same_bits(stage(staged, amaxes), expected)  # twice is once
    with pytest.raises(AssertionError):
        assert_same_bits(staged, history)


def test_count_nonfinite():
    state = stage_random(np.random.default_rng(0), random_state(np.random.default_rng(1), RECIPES["max"]))
    staged = [gemm["amax_history"][..., 0] for gemm in gemm_states(state)]
    expected = sum(int((~np.isfinite(np.asarray(amax))).sum()) for amax in staged)
    assert expected > 1
    count = jax.jit(count_nonfinite)(state)
    assert (count, count.dtype) == (expected, jnp.int32)
    assert count_nonfinite(update_state(state, RECIPES["max"])) == 0
    assert count_nonfinite({}) == 0


def test_keep_known_rows():
    before, after = one_gemm(0, 0, 0), one_gemm(0, 1, 8, scale=(5.0, 6.0, 7.0))
    before["dense"]["amax_history"] = before["dense"]["amax_history"].at[OUTPUT_GRADIENT, 2].set(9)
    kept = keep_known_rows(before, after)["dense"]
    assert_same_bits(kept["scale"], np.float32([5, 6, 4]))
    assert_same_bits(kept["amax_history"], np.float32([[0, 1, 8], [0, 1, 8], [0, 0, 9]]))


def test_map_gemms_pairs_the_same_gemm_of_every_collection():
    names = collection(lambda name: {"amax_history": name})
    reordered = {"block": dict(reversed(names["block"].items())), "top": names["top"]}
    pairs = map_gemms(lambda one, other: (one["amax_history"], other["amax_history"]), names, reordered)
    assert pairs == {"top": ("top",) * 2, "block": {"layers": ("layers",) * 2, "nested": ("nested",) * 2}}
    assert [gemm["amax_history"] for gemm in gemm_states(names)] == ["top", "nested", "layers"]
