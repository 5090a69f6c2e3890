"""The one update per optimizer step, against the oracle: every row of every GEMM, bit for bit."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3, INPUT, KERNEL, Format
from jax_fp8.core.recipe import CurrentScaling, DelayedScaling
from jax_fp8.core.state import gemm_states, map_gemms, no_amaxes, stage_joined
from jax_fp8.kernels import dispatch
from jax_fp8.kernels.update_state import TARGET, count_amaxes, finish_step, update_state

update_state_module = importlib.import_module("jax_fp8.kernels.update_state")

RECIPES = {
    "max": DelayedScaling(amax_history_len=5),
    "most_recent": DelayedScaling(amax_history_len=5, amax_compute_algo="most_recent"),
    "margin": DelayedScaling(amax_history_len=5, margin=3),
    "one_step": DelayedScaling(amax_history_len=1),
    "forget": DelayedScaling(amax_history_len=5, forget_outliers=True),
    "e4m3": DelayedScaling(amax_history_len=5, fp8_format=Format(forward=E4M3, backward=E4M3)),
}
# A GEMM of its own, three stacked by a scan, and 2 x 2 by two scans. Not in alphabetical order: jit sorts the keys of
# a dict.
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
    defaults = {
        "margin": recipe.margin,
        "algorithm": recipe.amax_compute_algo,
        "forget_outliers": recipe.forget_outliers,
    }
    settings = {**defaults, **settings}

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


def counts_of(state, recipe) -> np.ndarray:
    """`reference.count_amaxes` of a collection."""
    dtypes = [recipe.fp8_format.forward, recipe.fp8_format.forward, recipe.fp8_format.backward]
    rows = [(gemm["amax_history"][..., 0].ravel(), gemm["scale"].ravel()) for gemm in gemm_states(state)]
    return sum(reference.count_amaxes(*map(np.asarray, of_gemm), dtypes) for of_gemm in rows)


def test_staged_amaxes_that_are_not_finite_or_far_too_small_are_counted():
    recipe = RECIPES["max"]
    state = stage_random(np.random.default_rng(0), random_state(np.random.default_rng(1), recipe))
    expected = counts_of(state, recipe)
    assert np.all(expected > 1)
    updated, counts = finish_step(state, None, recipe)
    assert_same_bits(counts, expected)
    np.testing.assert_array_equal(finish_step(updated, None, recipe)[1], 0)
    np.testing.assert_array_equal(finish_step({}, None, recipe)[1], [0, 0])


def test_a_loop_of_ones_own_counts_the_same():
    recipe = RECIPES["max"]
    state = stage_random(np.random.default_rng(0), random_state(np.random.default_rng(1), recipe))
    counts = jax.jit(lambda state: count_amaxes(state, recipe))(state)
    expected = counts_of(state, recipe)
    assert counts == {"nonfinite_amaxes": expected[0], "underflowing_amaxes": expected[1]}
    assert count_amaxes({}, None) == {"nonfinite_amaxes": 0, "underflowing_amaxes": 0}
    with pytest.raises(ValueError, match="amax histories needs the DelayedScaling recipe"):
        count_amaxes(state, CurrentScaling())
    with pytest.raises(ValueError, match="recipe"):
        count_amaxes({}, "delayed")


@pytest.mark.parametrize("row", range(3))
def test_below_the_smallest_normal_number_is_too_small(row):
    """E4M3 begins at 2**-6, E5M2 at 2**-14."""
    smallest = 2.0 ** (-14 if row == 2 else -6)
    for staged, count in ((smallest, 0), (0.99 * smallest, 1), (0.0, 0)):
        state = one_gemm(0, 1, scale=(1.0, 1.0, 1.0))
        state["dense"]["amax_history"] = state["dense"]["amax_history"].at[row, 0].set(staged)
        counts = finish_step(state, None, DelayedScaling(amax_history_len=2))[1]
        np.testing.assert_array_equal(counts, [0, count])


def test_one_outlier_and_how_it_is_forgotten():
    """A batch of 1e30: without the option its scale stays for the whole history, with it for one step."""
    for forget in (False, True):
        recipe = DelayedScaling(amax_history_len=4, forget_outliers=forget)
        state, underflowing = one_gemm(0, 2, 2, 2), []
        for staged in (1e30, 2, 2, 2, 2, 2):
            state["dense"]["amax_history"] = state["dense"]["amax_history"].at[:, 0].set(staged)
            state, counts = finish_step(state, None, recipe)
            underflowing.append(int(counts[1]))
        assert underflowing == ([0, 3, 0, 0, 0, 0] if forget else [0, 3, 3, 3, 3, 0])
        assert_same_bits(state["dense"]["scale"], np.float32([2 / 448, 2 / 448, 2 / 57344]))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_recorded_amaxes_are_as_good_as_staged_ones(recipe):
    """Above some staged amaxes, below others, and not finite where the state is, or the other way round."""
    rng = np.random.default_rng(2)
    state = stage_random(rng, random_state(rng, recipe))
    recorded = jnp.asarray(random_staged(rng, no_amaxes(state).shape))
    staged = stage_joined(state, recorded)
    updated, counts = jax.jit(lambda state, recorded: finish_step(state, recorded, recipe))(state, recorded)
    assert_same_state(updated, oracle(staged, recipe))
    assert_same_bits(counts, counts_of(staged, recipe))
    assert np.all(counts > 1)
    with pytest.raises(AssertionError):  # they matter, and so does their order
        assert_same_state(updated, oracle(state, recipe))
    with pytest.raises(AssertionError):
        assert_same_state(updated, oracle(stage_joined(state, recorded[::-1]), recipe))


# ---- on a mesh, and as a program for CUDA ----------------------------------------------------------------------------

SPLITS = {"replicated": (P(), P()), "layers": (P("data"), P("data")), "history": (P(), P(None, None, "data"))}


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(request.param,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def reference_in_the_kernels_place(monkeypatch, traced_anew):
    """What runs is what the kernel's sharding rule makes of arrays, in `jnp`."""
    monkeypatch.setattr(dispatch, "_on_platform", lambda kernel, reference, *args: kernel(*args))
    monkeypatch.setattr(update_state_module, "_kernel", update_state_module._reference)


@pytest.mark.parametrize("split", SPLITS)
def test_a_state_that_is_split_is_gathered(mesh, reference_in_the_kernels_place, split):
    """Rows of a shard would be taken for others, and half of a history for all of it; the result is whole."""
    recipe, rng = DelayedScaling(amax_history_len=6), np.random.default_rng(3)
    scale, history = random_amaxes(rng, (2, 3)), random_amaxes(rng, (2, 3, 6))
    state = {"dense": {"scale": scale, "amax_history": history}}
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((scale, history), SPLITS[split], strict=True)
    ]
    recorded = jax.device_put(jnp.arange(6.0), NamedSharding(mesh, P("data")))
    run = jax.jit(
        lambda scale, history, recorded: finish_step(
            {"dense": {"scale": scale, "amax_history": history}}, recorded, recipe
        )
    )
    updated, _ = run(*placed, recorded)
    assert_same_state(updated, oracle(stage_joined(state, jnp.arange(6.0)), recipe))
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(updated))


def lowered(platform, recipe) -> str:
    state = random_state(np.random.default_rng(0), recipe)
    return (
        jax.jit(lambda state: update_state(state, recipe)).trace(state).lower(lowering_platforms=(platform,)).as_text()
    )


def test_cuda_is_asked_once_and_told_the_recipe(with_kernels):
    recipe = DelayedScaling(amax_history_len=5, margin=3, amax_compute_algo="most_recent")
    text = lowered("cuda", recipe)
    assert text.count(f"custom_call @{TARGET}") == 1
    for attribute in (
        'forward = "float8_e4m3fn"',
        'backward = "float8_e5m2"',
        "margin = 3 : i32",
        "most_recent = true",
        "forget_outliers = false",
    ):
        assert attribute in text
    assert text.count("output_operand_alias<") == 2 * len(STACKED)  # every scale and history where it lies
    assert TARGET not in lowered("cpu", recipe)
