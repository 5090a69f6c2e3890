"""TrainState: what it takes, what it gives back, what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze

import jax_fp8 as fp8

pytestmark = pytest.mark.versions


def variables(recipe):
    return fp8.Dense(16, recipe=recipe).init(jax.random.key(0), jnp.ones((16, 16)))


def test_create():
    given = variables(fp8.DelayedScaling(amax_history_len=2))
    state = fp8.TrainState.create(variables=given, tx=optax.adam(1e-3))
    assert int(state.step) == 0
    assert jax.tree.structure(state.variables) == jax.tree.structure(dict(given))
    assert jax.tree.structure(state.opt_state[0].mu) == jax.tree.structure(state.params)


def test_a_step_that_donates_its_state_leaves_the_callers_arrays_alone():
    recipe = fp8.DelayedScaling(amax_history_len=2)
    given = dict(variables(recipe))
    given["fp8_cache"] = fp8.cast_weights(given, recipe)
    tx = fp8.fused_adamw(1e-3)
    state = fp8.TrainState.create(variables=given, tx=tx)
    step = fp8.make_train_step(lambda v, x: jnp.sum(fp8.Dense(16, recipe=recipe).apply(v, x) ** 2), tx, recipe)
    before = jax.tree.map(jnp.copy, given)
    step(state, jnp.ones((16, 16)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))  # the control: it does donate
    jax.tree.map(lambda kept, leaf: jnp.array_equal(kept, leaf) or pytest.fail("changed"), before, given)


KEY = jax.random.key(3)
START = jnp.float32([1, 2])
SHARED = optax.GradientTransformation(
    lambda params: {"given": START, "twice": [made := jnp.zeros(2), made], "params": params, "step": 0.5},
    lambda updates, state, params=None: (updates, state),
)


@pytest.mark.parametrize("by_init_state", [False, True])
@pytest.mark.parametrize("name", ["noise", "shared"])
def test_a_step_leaves_what_the_optimizer_was_made_with_alone(name, by_init_state):
    """A random key, or anything else that `tx.init` hands out and did not make; so a second run has the same `tx`."""
    tx = optax.chain({"noise": optax.add_noise(0.1, 0.5, KEY), "shared": SHARED}[name], fp8.fused_adamw(1e-3))
    layer, x = fp8.Dense(16, recipe=None), jnp.ones((16, 16))
    step, losses = fp8.make_train_step(lambda v, x: jnp.sum(layer.apply(v, x) ** 2), tx, None), []
    given = layer.init(jax.random.key(0), x)
    for _ in range(2):
        made = step.init_state(layer.init, jax.random.key(0), x)
        state = made if by_init_state else fp8.TrainState.create(variables=given, tx=tx)
        for _ in range(2):
            before = state
            state, metrics = step(state, x)
        assert any(leaf.is_deleted() for leaf in jax.tree.leaves(before.opt_state[0]))  # the control: it does donate
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1]
    assert not START.is_deleted() and not KEY.is_deleted()


def test_what_the_optimizer_made_is_not_copied():
    """Moments of a large model would not fit twice."""
    made = []

    def init(params):
        made.append(optax.adam(1e-3).init(params))
        return made[-1]

    state = fp8.TrainState.create(
        variables=variables(None), tx=optax.GradientTransformation(init, optax.sgd(0.1).update)
    )
    assert state.opt_state[0].mu["kernel"] is made[0][0].mu["kernel"]


def test_replace_leaves_the_given_state_alone():
    state = fp8.TrainState.create(variables=variables(None), tx=optax.sgd(1e-3))
    assert int(state.replace(step=jnp.int32(7)).step) == 7
    assert int(state.step) == 0


def test_without_fp8_state():
    state = fp8.TrainState.create(variables=variables(None), tx=optax.sgd(1e-3))
    assert state.fp8 == {}
    assert set(state.variables) == {"params"}


def test_other_collections_are_copied_and_handed_on():
    stats = freeze({"norm": {"mean": jnp.ones(3)}})
    given = {**variables(None), "batch_stats": stats, "empty": {}}
    state = fp8.TrainState.create(variables=given, tx=optax.sgd(1e-3))
    assert set(state.variables) == {"params", "batch_stats", "empty"} and set(state.collections) == {
        "batch_stats",
        "empty",
    }
    mean = state.collections["batch_stats"]["norm"]["mean"]
    assert mean is not stats["norm"]["mean"] and jnp.array_equal(mean, jnp.ones(3))
    assert type(state.collections["batch_stats"]) is dict  # as a loss returns them
    new = state.replace(collections={})
    assert set(new.variables) == {"params"} and new.params is state.params


def test_without_collections_a_state_has_the_leaves_that_it_had_before_there_were_any():
    state = fp8.TrainState.create(variables=variables(None), tx=optax.sgd(1e-3))
    paths = [
        path[0].name
        for path, _ in jax.tree_util.tree_leaves_with_path(dataclasses.replace(state, opt_state=1, fp8=2, cache=3))
    ]
    assert [*dict.fromkeys(paths)] == ["step", "params", "fp8", "opt_state", "cache"]
    doubled = jax.tree.map(lambda x: 2 * x, state.replace(collections={"c": {"x": jnp.ones(2)}}))
    assert doubled.collections["c"]["x"].tolist() == [2, 2]
    assert jax.tree.structure(doubled) != jax.tree.structure(state)


def test_refuses_what_it_would_lose():
    with pytest.raises(ValueError, match='must not hold "_overwrite_with_gradient", which a step'):
        fp8.TrainState.create(variables={**variables(None), "_overwrite_with_gradient": {}}, tx=optax.sgd(1e-3))
    for leaf in ("text", np.array(["text"]), object()):
        with pytest.raises(
            ValueError, match=r"variables must hold arrays of numbers, got .* at variables\['c'\]\['x'\]; le"
        ):
            fp8.TrainState.create(variables={**variables(None), "c": {"x": leaf}}, tx=optax.sgd(1e-3))
    with pytest.raises(ValueError, match='must hold "params"'):
        fp8.TrainState.create(variables={"fp8": {}}, tx=optax.sgd(1e-3))


def test_new_params_and_scales_are_cast_again_and_nothing_else_is():
    recipe = fp8.DelayedScaling(amax_history_len=2)
    given = dict(variables(recipe))
    cache = fp8.cast_weights(given, recipe)
    state = fp8.TrainState.create(variables={**given, "fp8_cache": cache}, tx=optax.sgd(1e-3))
    assert set(state.variables) == {"params", "fp8", "fp8_cache"}
    assert state.replace(step=jnp.int32(7)).cache is state.cache
    params = jax.tree.map(lambda p: -p, state.params)
    cast = state.replace(params=params).cache["kernel"]
    assert jnp.array_equal(cast.rowwise.dequantize(), -cache["kernel"].rowwise.dequantize())
    doubled = jax.tree.map(lambda leaf: 2 * leaf, state.fp8)
    assert float(state.replace(fp8=doubled).cache["kernel"].rowwise.scale) == 2 * float(cache["kernel"].rowwise.scale)
    assert state.replace(params=params, cache={}).cache == {}
