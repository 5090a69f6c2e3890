"""What a loss says when it is traced: a kernel that it changes is right with one microbatch and refused with several;
and how often it is called.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import make_mesh
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


# --- how often the loss is called up to the first step ---------------------------------------------------------------


def calls_up_to_the_first_step(recipe, microbatches, axes, diagnoses, has_aux=False):
    """And the loss of that step."""
    calls = 0

    def loss_fn(variables, x):
        nonlocal calls
        calls += 1
        loss = jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32)))
        return (loss, {"square": loss}) if has_aux else loss

    model = Split(recipe)
    mesh = {"parallel": make_mesh(**axes)} if axes else {}
    step = fp8.make_train_step(loss_fn, TX, recipe, microbatches, has_aux=has_aux, **mesh)
    state = step.init_state(model.init, jax.random.key(0), X)
    _, metrics = step(state, X, diagnose=diagnoses)
    return calls, float(metrics["loss"])


class Split(nn.Module):
    """Two layers that `tensor` splits."""

    recipe: Any

    @nn.compact
    def __call__(self, x):
        x = nn.relu(fp8.Dense(64, recipe=self.recipe, tensor_split="columns", name="up")(x))
        return fp8.Dense(32, recipe=self.recipe, tensor_split="rows", name="down")(x)


MESHES = {"one device": {}, "data": {"data": 2}, "fsdp": {"fsdp": 2}, "both": {"fsdp": 2, "tensor": 2}}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_a_loss_is_called_at_most_twice_and_on_a_mesh_three_times(mesh, recipe):
    most = 3 if MESHES[mesh] else 1 if recipe is None else 2
    for microbatches, diagnoses in ((1, False), (2, False), (2, True)):
        called, loss = calls_up_to_the_first_step(RECIPES.get(recipe), microbatches, MESHES[mesh], diagnoses)
        assert 1 <= called <= most + (recipe is None and diagnoses and not MESHES[mesh])
        assert 0.01 < loss < 10


@pytest.mark.parametrize("mesh", ["one device", "data"])
def test_aux_of_several_parts_is_one_more_call(mesh):
    """Of another shape, the whole batch or a part of it: what a loss returns may depend on its rows."""
    called, _ = calls_up_to_the_first_step(RECIPES["delayed"], 2, MESHES[mesh], False, has_aux=True)
    assert called <= (4 if MESHES[mesh] else 3)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_mesh_multiplies_by_the_kernel_that_the_loss_hands_over(microbatches):
    """Of one microbatch, a kernel that is gathered in FP8 is cast from its param: one that the loss has scaled must not
    be. Of several, it is refused, as on one device.
    """
    one, state, _ = make("current", "scaled", 1)
    mesh, _, _ = make("current", "scaled", microbatches, parallel=make_mesh(fsdp=2))
    if microbatches > 1:
        with pytest.raises(ValueError, match="got second/kernel changed by the loss"):
            mesh.lower(state, X)
        return
    placed = mesh.place(jax.tree.map(jnp.array, state), X)
    expected = float(one(state, X)[1]["loss"])
    unchanged, plain, _ = make("current", "as it is", 1)
    assert abs(float(unchanged(plain, X)[1]["loss"]) / expected - 1) > 0.5
    np.testing.assert_allclose(float(mesh(placed, X)[1]["loss"]), expected, rtol=1e-3)
