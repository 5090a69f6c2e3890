"""TrainStep: what happens to the state that it is given, and copies of both."""

import copy as copies
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=4)
MODULE = nn.Sequential([fp8.Dense(32, recipe=RECIPE), nn.relu, fp8.Dense(32, recipe=RECIPE)])
BATCH = jax.random.normal(jax.random.key(0), (64, 32), jnp.bfloat16)


def loss_fn(variables, batch):
    return jnp.mean(jnp.square(MODULE.apply(variables, batch).astype(jnp.float32) - 1))


def start(tx):
    variables = jax.jit(MODULE.init)(jax.random.key(1), BATCH)
    return fp8.TrainState.create(variables=variables, tx=tx)


def test_the_given_state_is_donated():
    tx = optax.sgd(0.1)
    state = start(tx)
    fp8.make_train_step(loss_fn, tx, RECIPE)(state, BATCH)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    state = start(tx)
    fp8.make_train_step(loss_fn, tx, RECIPE, donate=False)(state, BATCH)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_step_is_not_pickled_and_its_state_is():
    tx = fp8.fused_adamw(1e-2)
    state, step = start(tx), fp8.make_train_step(loss_fn, tx, RECIPE)
    with pytest.raises(ValueError, match=r"a step cannot be pickled, .*; pickle its state, and call make_train_step"):
        pickle.dumps(step)
    assert copies.copy(step) is step and copies.deepcopy({"step": step})["step"] is step
    state, _ = step(state, BATCH)
    shallow, deep, again = copies.copy(state), copies.deepcopy(state), pickle.loads(pickle.dumps(state))
    expected, _ = step(shallow, BATCH)  # the same arrays
    for other in (deep, again):
        jax.tree.map(np.testing.assert_array_equal, step(other, BATCH)[0], expected)
