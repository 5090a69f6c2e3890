"""One batch times 1e30 in a training run with delayed scaling: what a user sees, what it costs, and what heals it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8

HISTORY = 8
X = jax.random.normal(jax.random.key(0), (32, 64))


def kernels_and_counts(recipe):
    """The kernel after every step, and what the steps count; the third batch is an outlier."""
    layer = fp8.Dense(32, use_bias=False, recipe=recipe)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    state = fp8.TrainState.create(variables=layer.init(jax.random.key(1), X), tx=tx)
    step = fp8.make_train_step(lambda variables, x: jnp.mean(layer.apply(variables, x) ** 2), tx, recipe)
    kernels, counts = [np.asarray(state.params["kernel"])], []
    for number in range(3 + 6):
        state, metrics = step(state, X * (1e30 if number == 2 else 1))
        kernels.append(np.asarray(state.params["kernel"]))
        counts.append(int(metrics["underflowing_amaxes"]))
    return kernels, counts


def learns(kernels) -> list[bool]:
    return [bool(np.any(before != after)) for before, after in itertools.pairwise(kernels)]


@pytest.mark.parametrize("forget_outliers", [False, True])
def test_a_batch_of_1e30_is_seen_and_can_be_forgotten(forget_outliers):
    recipe = fp8.DelayedScaling(amax_history_len=HISTORY, forget_outliers=forget_outliers)
    kernels, counts = kernels_and_counts(recipe)
    assert counts[:3] == [0, 0, 0]  # the outlier saturates: its own amax is large
    assert counts[3] > 0
    if forget_outliers:
        assert not any(counts[4:]) and all(learns(kernels)[4:])
    else:  # frozen for as long as the history is
        assert all(counts[3:]) and not any(learns(kernels)[3:])


def test_without_an_outlier_the_option_changes_no_bit():
    layers = [
        fp8.Dense(32, recipe=fp8.DelayedScaling(amax_history_len=HISTORY, forget_outliers=f)) for f in (False, True)
    ]
    states = []
    for layer in layers:
        variables = layer.init(jax.random.key(1), X)
        for scale in (1.0, 0.1, 30.0):
            _, _, staged = fp8.value_and_grad(lambda v, x, layer=layer: jnp.sum(layer.apply(v, x) ** 2))(
                variables, scale * X
            )
            variables = {**variables, "fp8": fp8.update_state(staged, layer.recipe)}
        states.append(variables["fp8"])
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert np.all(states[0]["scale"] != 1)
