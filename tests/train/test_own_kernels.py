"""A loss that changes kernels before FP8 layers read them: right with one microbatch, refused with several."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jax_fp8 as fp8

pytestmark = pytest.mark.versions

X = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=2),
    "current": fp8.CurrentScaling(),
    "block": fp8.BlockScaling(),
}
TX = optax.sgd(1.0)


class Two(nn.Module):
    recipe: Any

    @nn.compact
    def __call__(self, x):
        x = nn.relu(fp8.Dense(32, recipe=self.recipe, name="first")(x))
        return nn.remat(fp8.Dense)(32, recipe=self.recipe, name="second")(x)


CHANGES = {
    "as it is": lambda kernel: kernel,
    "cast": lambda kernel: kernel.astype(jnp.bfloat16),
    "scaled": lambda kernel: 3 * kernel,
    "frozen": lax.stop_gradient,
    "masked": lambda kernel: jnp.where(jnp.arange(32) < 16, kernel, 0),
}
ALLOWED = ("as it is", "cast")


def make(recipe, change, microbatches, **options):
    """A step, and the state before it, of a loss that changes the kernel of the second layer."""
    model = Two(RECIPES[recipe])

    def loss_fn(variables, x):
        params = variables["params"]
        second = {**params["second"], "kernel": CHANGES[change](params["second"]["kernel"])}
        changed = {**variables, "params": {**params, "second": second}}
        return jnp.mean(jnp.square(model.apply(changed, x).astype(jnp.float32)))

    variables = model.init(jax.random.key(0), X)
    step = fp8.make_train_step(loss_fn, TX, RECIPES[recipe], microbatches, warm_start=False, **options)
    return step, fp8.TrainState.create(variables=variables, tx=TX), loss_fn


def second_kernel(state):
    return np.asarray(state.params["second"]["kernel"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_loss_that_changes_a_kernel(recipe, change):
    step, state, loss_fn = make(recipe, change, 2)
    if change in ALLOWED:
        before, wanted = second_kernel(state), jax.jit(loss_fn)(state.variables, X)
        state, metrics = step(state, X)
        np.testing.assert_allclose(metrics["loss"], wanted, 0.02)
        assert np.any(second_kernel(state) != before)
    else:
        with pytest.raises(ValueError, match=r"got second/kernel changed by the loss; freeze params in the optimizer"):
            step(state, X)


@pytest.mark.parametrize("change", ["scaled", "frozen"])
def test_with_one_microbatch_it_is_done_as_it_says(change):
    step, state, loss_fn = make("delayed", change, 1)
    before, wanted = second_kernel(state), jax.jit(loss_fn)(state.variables, X)
    state, metrics = step(state, X)
    np.testing.assert_allclose(metrics["loss"], wanted, 0.02)
    assert np.array_equal(second_kernel(state), before) == (change == "frozen")


def test_a_cache_in_the_state_and_pieces_are_refused_too():
    step, state, _ = make("delayed", "scaled", 1)
    cache = {"fp8_cache": fp8.cast_weights(state.variables, RECIPES["delayed"])}
    with pytest.raises(ValueError, match="with several microbatches or a weight cache"):
        step(fp8.TrainState.create(variables=state.variables | cache, tx=TX), X)
    step, state, _ = make("delayed", "scaled", 2)
    with pytest.raises(ValueError, match="with several microbatches or a weight cache"):
        step.accumulate_step(state, step.start(state), X[:32], True)
