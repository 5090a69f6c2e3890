"""The end of a step: what it moves, and that a skipped one moves the step count alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from deltas import WARNS, by_deltas
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.core.state import no_amaxes
from jax_fp8.train.optimizer_step import OptimizerStep

RECIPE = fp8.DelayedScaling(amax_history_len=2)


IN_PLACE = fp8.fused_adamw(1e-2, skip_nonfinite=True)
BY_DELTAS = by_deltas(IN_PLACE)
MODES = pytest.mark.parametrize("tx", [IN_PLACE, BY_DELTAS], ids=["in_place", "deltas"])


def parts(tx):
    variables = dict(fp8.Dense(16, recipe=RECIPE).init(jax.random.key(0), jnp.ones((16, 16))))
    variables |= {"fp8_cache": fp8.cast_weights(variables, RECIPE), "counts": {"rows": jnp.zeros(3)}}
    state = fp8.TrainState.create(variables=variables, tx=tx)
    grads, amaxes = jax.tree.map(jnp.ones_like, state.params), no_amaxes(state.fp8) + 7
    return jax.jit(OptimizerStep(tx, RECIPE).__call__), state, grads, amaxes


def end(loss=1.0, skip_above=None, bad=False, tx=IN_PLACE):
    run, state, grads, amaxes = parts(tx)
    if bad:
        grads["kernel"] = grads["kernel"].at[2, 3].set(jnp.inf)
    limit = None if skip_above is None else jnp.float32(skip_above)
    return state, *run(state, jnp.float32(loss), grads, amaxes, limit, {"counts": {"rows": jnp.ones(3)}})


@WARNS
@MODES
def test_a_step_that_is_taken_moves_everything(tx):
    before, after, metrics = end(tx=tx)
    assert set(metrics) == {"loss", "nonfinite_amaxes", "underflowing_amaxes"} and int(after.step) == 1
    for name in ("params", "fp8", "opt_state", "cache", "collections"):
        pairs = zip(jax.tree.leaves(getattr(before, name)), jax.tree.leaves(getattr(after, name)), strict=True)
        assert any((np.asarray(old) != np.asarray(new)).any() for old, new in pairs), name
    kernel = after.cache["kernel"].rowwise
    assert_same_bits(kernel.scale, after.fp8["scale"][1])
    assert_same_bits(fp8.quantize(after.params["kernel"], kernel.dtype, kernel.scale).values, kernel.values)


@WARNS
@MODES
@pytest.mark.parametrize(
    "how", [{"loss": 5.0, "skip_above": 4.0}, {"loss": np.nan, "skip_above": np.inf}, {"bad": True}], ids=str
)
def test_a_step_that_is_skipped_moves_the_step_count_alone(how, tx):
    before, after, metrics = end(**how, tx=tx)
    jax.tree.map(assert_same_bits, dataclasses.replace(before, step=after.step), after)
    assert int(after.step) == 1 and int(metrics.get("skipped", 1)) == 1


def test_a_loss_at_the_limit_is_taken():
    _, after, metrics = end(loss=4.0, skip_above=4.0)
    assert int(metrics["skipped"]) == 0 and int(after.opt_state.count) == 1


def test_updates_that_a_transform_computes_with_are_added_and_the_step_says_so():
    _, in_place, _ = end()  # which warns of nothing, or this test would fail
    with pytest.warns(
        UserWarning, match="a transform computes with what fused_adam returns, .* to the end of the chain"
    ):
        _, after, _ = end(tx=BY_DELTAS)
    jax.tree.map(assert_same_bits, after, in_place)
    scaled = optax.chain(IN_PLACE, optax.scale(0.5))
    with pytest.warns(UserWarning, match="move fused_adam to the end of the chain"):
        _, half, _ = end(tx=scaled)
    with pytest.raises(AssertionError, match="elements differ"):  # negative control: other updates, other params
        jax.tree.map(assert_same_bits, half.params, in_place.params)


def test_an_optimizer_that_does_not_ask_fused_adam_to_work_in_place_is_told_of():
    fused, other = (optax.with_extra_args_support(optax.MultiSteps(tx, 1)) for tx in (IN_PLACE, optax.adamw(1e-2)))
    with pytest.warns(UserWarning, match=r"such as optax.MultiSteps, .* slower than in place; accumulate gradients "):
        _, after, _ = end(tx=fused)
    _, in_place, _ = end()
    jax.tree.map(assert_same_bits, after.params, in_place.params)
    end(tx=other)  # negative control: nothing here could work in place


def test_another_error_of_an_optimizer_is_not_swallowed():
    def fail(*_, **__):
        raise ValueError("of its own")

    with pytest.raises(ValueError, match="of its own"):
        end(tx=optax.GradientTransformationExtraArgs(IN_PLACE.init, fail))
