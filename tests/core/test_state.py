"""What the state is made of, how amaxes are staged in it, and that joined amaxes find their rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3, OUTPUT_GRADIENT
from jax_fp8.core.recipe import DelayedScaling
from jax_fp8.core.state import (
    JOINED,
    cold_rows,
    gemm_states,
    initial_state,
    join_amaxes,
    keep_known_rows,
    known_rows,
    map_gemms,
    no_amaxes,
    stage,
    stage_joined,
)

pytestmark = pytest.mark.versions


def random_amaxes(rng, shape) -> np.ndarray:
    return np.exp2(rng.uniform(-60, 60, shape)).astype(np.float32)


def collection(leaves) -> dict:
    """GEMMs at two depths. Not in alphabetical order: jit sorts the keys of a dict."""
    return {"top": leaves("top"), "block": {"nested": leaves("nested"), "layers": leaves("layers")}}


def one_gemm(*history, scale=(2.0, 3.0, 4.0)) -> dict:
    """A collection of one GEMM whose rows have the same history."""
    return {"dense": {"scale": jnp.float32(scale), "amax_history": jnp.tile(jnp.float32(history), (3, 1))}}


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


@pytest.mark.parametrize("count", [1, JOINED, JOINED + 1, 5 * JOINED])
def test_joined_amaxes_stand_in_the_order_of_the_gemms(count):
    rng = np.random.default_rng(0)
    shapes = [(3,), (2, 3), (2, 2, 3)]
    amaxes = [random_amaxes(rng, shapes[i % 3]) for i in range(count)]
    joined = jax.jit(join_amaxes)([jnp.asarray(array) for array in amaxes])
    assert_same_bits(joined, np.concatenate([array.ravel() for array in amaxes]))


def test_joined_amaxes_are_staged_where_they_belong():
    rng = np.random.default_rng(0)
    shapes = {"top": (3,), "nested": (2, 2, 3), "layers": (4, 3)}

    def leaves(name):
        return {"scale": jnp.ones(shapes[name]), "amax_history": jnp.asarray(random_amaxes(rng, (*shapes[name], 5)))}

    state = collection(leaves)
    amaxes = {id(gemm["scale"]): random_amaxes(rng, gemm["scale"].shape) for gemm in gemm_states(state)}
    expected = map_gemms(
        lambda gemm: {**gemm, "amax_history": stage(gemm["amax_history"], amaxes[id(gemm["scale"])])}, state
    )
    joined = join_amaxes([amaxes[id(gemm["scale"])] for gemm in gemm_states(state)])
    for staged in (stage_joined(state, joined), jax.jit(stage_joined)(state, joined)):  # jit sorts the keys of a dict
        jax.tree.map(assert_same_bits, staged, expected)
    with pytest.raises(AssertionError):
        jax.tree.map(assert_same_bits, stage_joined(state, joined[::-1]), expected)
    jax.tree.map(assert_same_bits, stage_joined(state, no_amaxes(state)), state)
    assert stage_joined({}, no_amaxes({})) == {}


def test_keep_known_rows():
    before, after = one_gemm(0, 0, 0), one_gemm(0, 1, 8, scale=(5.0, 6.0, 7.0))
    before["dense"]["amax_history"] = before["dense"]["amax_history"].at[OUTPUT_GRADIENT, 2].set(9)
    kept = keep_known_rows(before, after)["dense"]
    assert_same_bits(kept["scale"], np.float32([5, 6, 4]))
    assert_same_bits(kept["amax_history"], np.float32([[0, 1, 8], [0, 1, 8], [0, 0, 9]]))


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("layers", [(), (2,)])
@pytest.mark.parametrize(
    ("length", "scale", "history", "known"),
    [
        (3, [1, 0.2, 1], [0, 0, 0], [False, False, False]),  # as it began
        (3, [5, 0.2, 7], [0, 0, 0], [False, False, False]),  # scales that nothing followed from
        (3, [5, 0.2, 1], [8, 4, 0], [True, True, False]),  # whose backward has not run
        (1, [1, 0.2, 1], [0, 0, 0], [False, False, False]),
        (1, [5, 0.2, 7], [0, 0, 0], [True, True, True]),  # after a step
        (1, [5, 0.2, 1], [0, 0, 0], [True, True, False]),
        (1, [1, 3.0, 7], [0, 0, 0], [False, True, True]),  # of attention, where the first row may be unused
        (1, [1, 0.2, 1], [8, 0, 0], [True, False, False]),  # staged, and not finished
    ],
)
def test_which_rows_are_known(xp, layers, length, scale, history, known):
    scale = np.tile(np.float32(scale), (*layers, 1))
    history = np.concatenate([np.zeros((3, length - 1)), np.float32(history)[:, None]], 1).astype(np.float32)
    gemm = {"scale": xp.asarray(scale), "amax_history": xp.asarray(np.tile(history, (*layers, 1, 1)))}
    np.testing.assert_array_equal(known_rows(gemm), np.tile(known, (*layers, 1)))
    cold = cold_rows({"b": gemm, "a": {"c": gemm}})
    assert isinstance(cold, np.ndarray if xp is np else jax.Array)
    np.testing.assert_array_equal(cold, np.tile(~np.asarray(known), 2 * max(1, *layers, 1)))


def test_map_gemms_pairs_the_same_gemm_of_every_collection():
    names = collection(lambda name: {"amax_history": name})
    reordered = {"block": dict(reversed(names["block"].items())), "top": names["top"]}
    pairs = map_gemms(lambda one, other: (one["amax_history"], other["amax_history"]), names, reordered)
    assert pairs == {"top": ("top",) * 2, "block": {"layers": ("layers",) * 2, "nested": ("nested",) * 2}}
    assert [gemm["amax_history"] for gemm in gemm_states(names)] == ["layers", "nested", "top"]  # as jit orders them
