"""The training step: microbatches, warm start, donation, copies, and what reaches the optimizer.

The FP8 state is compared bit for bit.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import jax_fp8 as fp8

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=4)
FEATURES = 32


class Tied(nn.Module):
    """One layer used twice and one used once."""

    recipe: fp8.DelayedScaling | fp8.CurrentScaling | None = RECIPE

    @nn.compact
    def __call__(self, x):
        twice = fp8.Dense(FEATURES, recipe=self.recipe, name="twice")
        return fp8.Dense(FEATURES, recipe=self.recipe, name="once")(nn.relu(twice(nn.relu(twice(x)))))


def loss_of(module):
    def loss(variables, batch):
        y = module.apply(variables, batch["x"]).astype(jnp.float32)
        return jnp.mean(jnp.square(y - batch["target"]))

    return loss


def batch_of(rows=64, seed=0):
    keys = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(keys[0], (rows, FEATURES), jnp.bfloat16)
    return {"x": x, "target": jax.random.normal(keys[1], (rows, FEATURES))}


@functools.cache
def first_variables(recipe):
    return jax.jit(Tied(recipe).init)(jax.random.key(1), batch_of()["x"])


def start(tx, recipe=RECIPE):
    """A module, and a state of its own: steps donate theirs."""
    return Tied(recipe), fp8.TrainState.create(variables=copy(first_variables(recipe)), tx=tx)


def copy(tree):
    return jax.tree.map(jnp.copy, tree)


def test_state_and_metrics():
    tx = fp8.fused_adamw(1e-2)
    module, state = start(tx)
    step = fp8.make_train_step(loss_of(module), tx, RECIPE)
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch_of())
        losses.append(float(metrics["loss"]))
    assert int(state.step) == 20
    assert metrics["loss"].dtype == jnp.float32
    assert int(metrics["nonfinite_amaxes"]) == 0
    assert losses[-1] < 0.8 * losses[0]
    module.apply(state.variables, batch_of()["x"])


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_stage_the_maximum_and_roll_once(microbatches):
    tx = optax.sgd(0.0)
    module, state = start(tx)
    whole = fp8.make_train_step(loss_of(module), tx, RECIPE, warm_start=False)
    split = fp8.make_train_step(loss_of(module), tx, RECIPE, microbatches, warm_start=False)
    batch = batch_of()
    _, _, by_hand = jax.jit(fp8.value_and_grad(loss_of(module)))(
        state.variables, {k: v[::microbatches] for k, v in batch.items()}
    )
    state_whole, metrics_whole = whole(copy(state), batch)
    state_split, metrics_split = split(copy(state), batch)
    for name in ("twice", "once"):
        newest_whole, newest_split = (s.fp8[name]["amax_history"][:, -1] for s in (state_whole, state_split))
        np.testing.assert_allclose(
            newest_split[:2], newest_whole[:2], rtol=2**-7
        )  # the maximum over all rows, not the sum
        assert float(newest_split[2]) == pytest.approx(
            microbatches * float(newest_whole[2]), rel=0.1
        )  # each microbatch's loss is a mean over fewer rows
        np.testing.assert_array_equal(
            state_split.fp8[name]["amax_history"][:, :-1], 0
        )  # rolled once, not per microbatch
        first = by_hand[name]["amax_history"][:, 0]
        assert (np.asarray(newest_split) >= np.asarray(first)).all()
    assert metrics_split["loss"] == pytest.approx(float(metrics_whole["loss"]), rel=1e-5)


def test_microbatch_state_is_the_maximum_of_the_microbatches_exactly():
    tx = optax.sgd(0.0)
    module, state = start(tx)
    batch, n = batch_of(), 4
    step = fp8.make_train_step(loss_of(module), tx, RECIPE, n, warm_start=False)
    one_pass = jax.jit(fp8.value_and_grad(loss_of(module)))
    passes = [one_pass(state.variables, {k: v[i::n] for k, v in batch.items()}) for i in range(n)]
    staged = jax.tree.map(
        lambda *leaves: jnp.max(jnp.stack(leaves), axis=0), *(fp8_state for _, _, fp8_state in passes)
    )
    expected = fp8.update_state(staged, RECIPE)
    after, _ = step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, after.fp8, expected)
    last = fp8.update_state(passes[-1][2], RECIPE)  # negative control: the last microbatch alone would be another state
    assert any(
        np.any(np.asarray(a != b)) for a, b in zip(jax.tree.leaves(after.fp8), jax.tree.leaves(last), strict=True)
    )


def test_microbatch_gradients_are_the_mean():
    tx = optax.sgd(1.0)
    module, state = start(tx, recipe=None)
    batch = batch_of()
    before = copy(state.params)
    after, _ = fp8.make_train_step(loss_of(module), tx, None, 4)(state, batch)
    grads = jax.grad(loss_of(module))({"params": before}, batch)["params"]
    for name in ("twice", "once"):
        step = before[name]["kernel"] - after.params[name]["kernel"]
        reference.assert_close(step, grads[name]["kernel"], "bfloat16")


def test_warm_start_scales_the_first_step():
    tx = optax.sgd(0.0)
    module, state = start(tx)
    batch = batch_of()
    cold, _ = fp8.make_train_step(loss_of(module), tx, RECIPE, warm_start=False)(copy(state), batch)
    warm, _ = fp8.make_train_step(loss_of(module), tx, RECIPE)(copy(state), batch)
    history = warm.fp8["once"]["amax_history"]
    assert (history[:, -2:] > 0).all()  # the warm start's amax, then the first step's
    np.testing.assert_array_equal(cold.fp8["once"]["amax_history"][:, -2], 0)


def test_warm_start_saves_gradients_that_a_scale_of_1_would_flush():
    tx, tiny = optax.sgd(0.0), 1e-6
    _, state = start(tx)
    batch = batch_of()

    def loss(recipe):
        return lambda variables, batch: tiny * loss_of(Tied(recipe))(variables, batch)

    warm, _ = fp8.make_train_step(loss(RECIPE), tx, RECIPE)(copy(state), batch)
    wanted = jax.grad(loss(None))({"params": state.params}, batch)["params"]["twice"]["kernel"]

    def error(fp8_state):
        _, grads, _ = fp8.value_and_grad(loss(RECIPE))({"params": state.params, "fp8": fp8_state}, batch)
        return reference.relative_error(grads["twice"]["kernel"], wanted)

    assert error(warm.fp8) < reference.TOLERANCE["block_gradient"]
    assert error(state.fp8) > 0.9


def test_warm_start_happens_once_and_not_in_a_run_that_goes_on():
    tx = optax.sgd(0.0)
    module, state = start(tx)
    step = fp8.make_train_step(loss_of(module), tx, RECIPE)
    state, _ = step(state, batch_of())
    state, _ = step(state, batch_of())
    assert int((state.fp8["once"]["amax_history"][0] > 0).sum()) == 3
    restored = copy(state)  # as from a checkpoint, into a new step
    resumed, _ = fp8.make_train_step(loss_of(module), tx, RECIPE, warm_start=False)(copy(restored), batch_of())
    again, _ = fp8.make_train_step(loss_of(module), tx, RECIPE)(restored, batch_of())
    jax.tree.map(np.testing.assert_array_equal, resumed.fp8, again.fp8)


def test_warm_start_keeps_calibrated_history():
    tx = optax.sgd(0.0)
    module, state = start(tx)
    _, staged = module.apply(state.variables, 8 * batch_of()["x"], mutable=["fp8"])
    calibrated = fp8.update_state(staged["fp8"], RECIPE)
    state = fp8.TrainState(state.step, state.params, calibrated, state.opt_state)
    after, _ = fp8.make_train_step(loss_of(module), tx, RECIPE)(copy(state), batch_of())
    assert after.fp8["twice"]["amax_history"][0].max() == staged["fp8"]["twice"]["amax_history"][0, 0]
    assert (after.fp8["twice"]["amax_history"][2, -2:] > 0).all()  # the gradient had none, and was warmed


def test_warm_start_makes_scales_for_params_that_come_without():
    """As before step 0, at any step, by itself too; there is nothing to make for a recipe without state."""
    tx, batch = optax.sgd(0.0), batch_of()
    module, state = start(tx)
    step = fp8.make_train_step(loss_of(module), tx, RECIPE)
    expected = step(copy(state), batch)[0].fp8
    late = fp8.TrainState(jnp.int32(7), state.params, state.fp8, state.opt_state)
    warmed, _ = step(step.warm_start(copy(late), batch), batch)
    assert int(warmed.step) == 8
    jax.tree.map(np.testing.assert_array_equal, warmed.fp8, expected)
    by_itself, _ = step(copy(late), batch)
    jax.tree.map(np.testing.assert_array_equal, by_itself.fp8, expected)
    cold, _ = fp8.make_train_step(loss_of(module), tx, RECIPE, warm_start=False)(late, batch)  # the control
    assert (cold.fp8["once"]["amax_history"][:, -2] == 0).all()
    module, state = start(tx, fp8.CurrentScaling())
    assert fp8.make_train_step(loss_of(module), tx, fp8.CurrentScaling()).warm_start(state, batch) is state


def test_global_norm_clipping_sees_params_only():
    batch, norms = batch_of(), []
    for recipe in (RECIPE, None):
        tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
        module, state = start(tx, recipe)
        before = copy(state.params)
        after, _ = fp8.make_train_step(loss_of(module), tx, recipe)(state, batch)
        norms.append(float(optax.tree.norm(jax.tree.map(jnp.subtract, before, after.params))))
    assert norms == pytest.approx([1e-3, 1e-3], rel=1e-3)


def test_jit_and_no_jit_agree():
    tx = optax.sgd(0.1)
    module, state = start(tx)
    batch = batch_of()
    step = fp8.make_train_step(loss_of(module), tx, RECIPE, warm_start=False)
    jitted, _ = step(copy(state), batch)
    with jax.disable_jit():
        eager, _ = step(copy(state), batch)
    jax.tree.map(np.testing.assert_array_equal, jitted.fp8, eager.fp8)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
def test_a_nonfinite_amax_is_counted_and_leaves_its_row(value, microbatches):
    tx = optax.sgd(0.0)
    module, state = start(tx)
    step = fp8.make_train_step(loss_of(module), tx, RECIPE, microbatches)
    state, metrics = step(state, batch_of())
    assert int(metrics["nonfinite_amaxes"]) == 0
    before = copy(state.fp8)
    batch = batch_of()
    state, metrics = step(state, {**batch, "x": batch["x"].at[0, 0].set(value)})
    assert int(metrics["nonfinite_amaxes"]) > 0
    np.testing.assert_array_equal(state.fp8["twice"]["amax_history"][0], before["twice"]["amax_history"][0])
    assert state.fp8["twice"]["scale"][0] == before["twice"]["scale"][0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.fp8))


def test_microbatches_with_nonfinite_gradients_are_skipped():
    tx = fp8.fused_adamw(1e-2, skip_nonfinite=True)
    module, state = start(tx)
    step = fp8.make_train_step(loss_of(module), tx, RECIPE, 2, warm_start=False)
    before, batch = jax.device_get(state), batch_of()
    state, _ = step(state, batch | {"x": batch["x"].at[3, 4].set(jnp.nan)})
    for name in ("params", "fp8", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(getattr(state, name)), getattr(before, name))
    state, _ = step(state, batch)
    assert not np.array_equal(state.params["once"]["kernel"], before.params["once"]["kernel"])


def test_data_parallel_equals_one_device():
    tx = optax.sgd(0.1)
    module, state = start(tx)
    batch = batch_of(rows=128)
    step = fp8.make_train_step(loss_of(module), tx, RECIPE, 2)
    alone, alone_metrics = step(copy(state), batch)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)) for spec in (("data",), ()))
    sharded, metrics = step(jax.device_put(state, whole), jax.device_put(batch, rows))
    assert metrics["loss"] == pytest.approx(float(alone_metrics["loss"]), rel=1e-5)
    jax.tree.map(np.testing.assert_array_equal, sharded.fp8, alone.fp8)
    for name in ("twice", "once"):
        reference.assert_close(sharded.params[name]["kernel"], alone.params[name]["kernel"], "float32")


def test_misuse():
    tx = optax.sgd(0.1)
    module, state = start(tx)
    with pytest.raises(
        ValueError, match="microbatches must divide the batch size, got microbatches=3 and a batch of 64"
    ):
        fp8.make_train_step(loss_of(module), tx, RECIPE, 3)(state, batch_of())
    with pytest.raises(ValueError, match="microbatches must be an integer of at least 1, got 0"):
        fp8.make_train_step(loss_of(module), tx, RECIPE, 0)
    with pytest.raises(ValueError, match="pass the recipe the model was made with"):
        fp8.make_train_step(loss_of(module), tx, None)(state, batch_of())
    module, state = start(tx, None)
    with pytest.raises(ValueError, match="give the model the same recipe"):
        fp8.make_train_step(loss_of(module), tx, RECIPE)(state, batch_of())
