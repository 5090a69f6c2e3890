"""`balance_experts`: correction biases follow the load of the experts, and everything else the optimizer inside."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import make_mesh

import jax_fp8 as fp8

FEATURES, EXPERTS = 32, 8
LAYER = fp8.LayerNormMoE(
    32,
    EXPERTS,
    norm="rmsnorm",
    router_correction_bias=True,
    router_scores="sigmoid",
    router_aux_loss=0.0,
    recipe=None,
    dtype=jnp.float32,
)
X = np.random.default_rng(0).normal(0.5, 1, size=(256, FEATURES)).astype(np.float32)


def variables_of(layer=LAYER):
    return jax.device_get(jax.jit(layer.init)(jax.random.key(0), X))


def loss_fn(variables, x):
    return jnp.mean(jnp.square(LAYER.apply(variables, x).astype(jnp.float32) - x))


def loads(variables, x=X):
    """How many tokens each expert gets, of NumPy's own routing."""
    params = variables["params"]
    x = np.asarray(x, np.float64)
    normalized = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    logits = normalized @ np.asarray(params["router"]["kernel"], np.float64)
    scores = 1 / (1 + np.exp(-logits)) + np.asarray(params["router"]["correction_bias"])
    return np.bincount(np.argsort(-scores, axis=1)[:, :2].reshape(-1), minlength=EXPERTS)


def run(tx, steps=1, **options):
    step = fp8.make_train_step(loss_fn, tx, None, **options)
    state = fp8.TrainState.create(variables=variables_of(), tx=tx)
    if "parallel" in options:
        state = step.place(state, X)
    for _ in range(steps):
        state, metrics = step(state, X)
    return jax.device_get(state), metrics


OPTIMIZERS = {"fused": fp8.fused_adamw(1e-2), "optax": optax.adamw(1e-2)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"microbatches": 4}, {"data": 4}, {"data": 2, "microbatches": 2}], ids=str)
def test_a_step_moves_each_bias_by_the_load_of_the_whole_batch(optimizer, options):
    mesh = {"parallel": make_mesh(data=options["data"])} if "data" in options else {}
    options = mesh | {name: value for name, value in options.items() if name == "microbatches"}
    state, _ = run(fp8.balance_experts(OPTIMIZERS[optimizer], 0.25), **options)
    load = loads(variables_of())
    assert len(set(load)) > 4
    np.testing.assert_array_equal(state.params["router"]["correction_bias"], -0.25 * np.sign(load - load.mean()))
    plain, _ = run(fp8.freeze(OPTIMIZERS[optimizer], "correction_bias"), **options)
    for name in ("up", "down", "norm"):
        jax.tree.map(np.testing.assert_array_equal, state.params[name], plain.params[name])
    np.testing.assert_array_equal(state.params["router"]["kernel"], plain.params["router"]["kernel"])


def test_experts_become_balanced_and_without_it_they_do_not():
    still = fp8.freeze(optax.sgd(0.0), "correction_bias")
    balanced, _ = run(fp8.balance_experts(optax.sgd(0.0), 0.02), steps=60)
    before, _ = run(still, steps=60)
    found, unbalanced = (loads({"params": state.params}) for state in (balanced, before))
    assert unbalanced.max() > 1.5 * unbalanced.mean() and found.max() < 1.2 * found.mean()


def test_the_gradient_of_a_bias_vanishes_in_a_global_norm():
    grads = jax.jit(jax.grad(loss_fn))(variables_of(), X)["params"]
    bias = np.asarray(grads["router"]["correction_bias"])
    assert 0 < np.linalg.norm(bias) < 1e-5 * float(optax.tree.norm(grads))


def test_a_schedule_and_a_rate_of_zero():
    decaying = fp8.balance_experts(fp8.fused_adamw(1e-2), optax.piecewise_constant_schedule(0.25, {1: 0.0}))
    one, two = (run(decaying, steps=steps)[0] for steps in (1, 2))
    assert int(two.opt_state.count) == 2
    np.testing.assert_array_equal(one.params["router"]["correction_bias"], two.params["router"]["correction_bias"])
    assert np.all(one.params["up"]["kernel"] != two.params["up"]["kernel"])
    still, _ = run(fp8.balance_experts(fp8.fused_adamw(1e-2), 0))
    assert not still.params["router"]["correction_bias"].any()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_moves_nothing(optimizer):
    tx = fp8.balance_experts(OPTIMIZERS[optimizer], 0.25)
    step = fp8.make_train_step(loss_fn, tx, None)
    state, _ = step(fp8.TrainState.create(variables=variables_of(), tx=tx), X)
    before = jax.device_get(state)
    state, metrics = step(state, X, skip_above=-1.0)
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (before.params, before.opt_state))
    state, _ = step(state, X)
    assert np.any(state.params["router"]["correction_bias"] != before.params["router"]["correction_bias"])


def test_in_a_loop_of_ones_own_with_optax():
    variables = variables_of()
    tx = fp8.balance_experts(optax.chain(optax.clip_by_global_norm(0.5), fp8.fused_adamw(1e-2)), 0.25)
    grads = jax.jit(jax.grad(loss_fn))(variables, X)["params"]
    updates, _ = tx.update(grads, tx.init(variables["params"]), variables["params"])
    new = optax.apply_updates(variables["params"], updates)
    load = loads(variables)
    np.testing.assert_array_equal(new["router"]["correction_bias"], -0.25 * np.sign(load - load.mean()))


def test_refusals():
    params = variables_of()["params"]
    with pytest.raises(ValueError, match=r"must not train the correction bias .* got router/correction_bias; wrap"):
        fp8.fused_adamw(1e-3).init(params)
    fp8.freeze(fp8.fused_adamw(1e-3), "correction_bias").init(params)
    with pytest.raises(ValueError, match="balance_experts needs params with a correction_bias, got none"):
        fp8.balance_experts(optax.sgd(0.1)).init({"kernel": jnp.ones(3)})
    for rate in (-1, float("nan"), "fast"):
        with pytest.raises(ValueError, match="update_rate must be a finite number that is not negative"):
            fp8.balance_experts(optax.sgd(0.1), rate)
