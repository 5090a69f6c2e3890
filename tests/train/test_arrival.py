"""A state from somewhere else is looked at once: numbers that no step leaves, another dtype, masters apart."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=3)
LAYER = fp8.Dense(32, recipe=RECIPE)
X = jax.random.normal(jax.random.key(0), (32, 32))
TX = fp8.fused_adamw(1e-3, skip_nonfinite=True)
VARIABLES = LAYER.init(jax.random.key(1), X)


def loss(variables, x):
    return jnp.mean((LAYER.apply(variables, x).astype(jnp.float32) - x) ** 2)


STEP = fp8.make_train_step(loss, TX, RECIPE)


def state(fp8_state=None, step=0):
    made = fp8.TrainState.create(variables=VARIABLES, tx=TX)
    return made.replace(step=jnp.int32(step), fp8=jax.tree.map(jnp.copy, made.fp8 if fp8_state is None else fp8_state))


def with_number(name, index, number):
    return {**VARIABLES["fp8"], name: VARIABLES["fp8"][name].at[index].set(number)}


@pytest.mark.parametrize("warm_start", [True, False])
@pytest.mark.parametrize("step", [0, 7])
@pytest.mark.parametrize(
    ("name", "index", "number", "message"),
    [
        ("scale", 0, 0.0, "every scale of the FP8 state must be positive and finite, got 0.0 in the layer; restore"),
        ("scale", 1, jnp.nan, "every scale .* got nan in"),
        ("scale", 2, jnp.inf, "every scale .* got inf in"),
        ("scale", 0, -2.0, "every scale .* got -2.0 in"),
        ("amax_history", (1, 2), jnp.nan, "every amax_history .* must be finite and not negative, got nan in"),
        ("amax_history", (2, 1), jnp.inf, "every amax_history .* got inf in"),
        ("amax_history", (0, 1), -1.0, "every amax_history .* got -1.0 in"),
    ],
)
def test_numbers_that_no_step_leaves_are_refused(name, index, number, message, step, warm_start):
    of_step = STEP if warm_start else fp8.make_train_step(loss, TX, RECIPE, warm_start=False)
    with pytest.raises(ValueError, match=message):
        of_step(state(with_number(name, index, number), step), X)


def test_numbers_that_a_step_leaves_are_taken():
    after, _ = STEP(state(), X)
    STEP(jax.tree.map(jnp.asarray, jax.device_get(after)), X)
    STEP(state(with_number("amax_history", (0, 0), jnp.inf)), X)  # staged, and not finished: the row stays as it was


def test_a_state_of_the_steps_own_is_not_read(monkeypatch):
    after, _ = STEP(state(), X)
    monkeypatch.setattr("jax_fp8.train.arrival.on_host", lambda _: pytest.fail("the host waits for the device"))
    after, _ = STEP(after, X)
    with pytest.raises(pytest.fail.Exception):
        STEP(jax.tree.map(jnp.copy, after), X)


def cast(tree, dtype=jnp.bfloat16):
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def staged(variables):
    return fp8.update_state(variables["fp8"], RECIPE)


CAST = {**VARIABLES, "fp8": cast(VARIABLES["fp8"])}
HALF = {**VARIABLES, "fp8": {**VARIABLES["fp8"], "amax_history": cast(VARIABLES["fp8"]["amax_history"])}}


@pytest.mark.parametrize("variables", [CAST, HALF], ids=["all", "the history"])
@pytest.mark.parametrize(
    "use",
    [
        lambda given: STEP(state(given["fp8"]), X),
        lambda given: STEP.warm_start(state(given["fp8"]), X),
        lambda given: STEP.start(state(given["fp8"])),
        lambda given: LAYER.apply(given, X),
        lambda given: LAYER.apply(given, X, mutable=["fp8"]),
        lambda given: jax.jit(fp8.value_and_grad(loss))(given, X),
        lambda given: fp8.warm_start(loss, RECIPE)(given, X),
        staged,
        jax.jit(staged),
        lambda given: fp8.count_amaxes(given["fp8"], RECIPE),
    ],
    ids=["step", "warm", "start", "apply", "calibrate", "value_and_grad", "warm_start", "update", "jitted", "count"],
)
def test_a_state_in_another_dtype_is_refused(use, variables):
    with pytest.raises(ValueError, match=r"the FP8 state must be float32, got .* as bfloat16.*; leave out the coll"):
        use(variables)
    use(VARIABLES)  # the control


def test_a_whole_train_state_in_another_dtype_is_refused():
    with pytest.raises(ValueError, match="the FP8 state must be float32, got scale of the layer as bfloat16"):
        STEP(cast(state()), X)


MASTERS = fp8.fused_adamw(1e-3)
PLAIN = fp8.Dense(32, recipe=None, param_dtype=jnp.bfloat16)


def plain_step():
    return fp8.make_train_step(lambda v, x: jnp.mean((PLAIN.apply(v, x) - x) ** 2), MASTERS, None)


def restored(step, change):
    made = fp8.TrainState.create(variables=PLAIN.init(jax.random.key(1), X), tx=MASTERS)
    masters = jax.tree.map(lambda master: master + change, made.opt_state.master)
    return made.replace(step=jnp.int32(step), opt_state=made.opt_state._replace(master=masters))


def test_masters_of_other_params_are_told_once():
    step = plain_step()
    with pytest.warns(UserWarning, match="must round to their params, got 1,056 elements that do not; .* restore into"):
        after, _ = step(restored(3, 65_535.0), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(after, X)
        step(restored(3, 65_535.0), X)
        for number, change in ((0, 65_535.0), (3, 0.0)):  # a new state may have any; and one that was restored right
            plain_step()(restored(number, change), X)


def test_adam_without_masters_has_nothing_to_tell():
    tx = optax.adam(1e-3)
    step = fp8.make_train_step(loss, tx, RECIPE)
    made = fp8.TrainState.create(variables=VARIABLES, tx=tx)
    after, _ = step(made.replace(step=jnp.int32(5)), X)
    assert np.isfinite(after.params["kernel"]).all()
