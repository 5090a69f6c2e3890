"""fused_adam against Optax and against float64, its master weights, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8

SHAPES = {"matrix": (33, 17), "vector": (5,), "one": (1,), "empty": (0, 4)}


def tree(seed, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {name: jax.random.normal(key, shape, dtype) for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)}


def run(tx, params, steps=50, apply=fp8.apply_updates):
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return apply(params, updates), state

    for i in range(steps):
        params, state = step(params, state, tree(100 + i))
    return params, state


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (fp8.fused_adam(1e-2), optax.adam(1e-2)),
        (fp8.fused_adamw(1e-2, weight_decay=0.1), optax.adamw(1e-2, weight_decay=0.1)),
        (fp8.fused_adam(optax.linear_schedule(1e-2, 0.0, 50)), optax.adam(optax.linear_schedule(1e-2, 0.0, 50))),
        (
            fp8.fused_adam(1e-2, weight_decay=0.1, adam_w_mode=False),
            optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-2)),
        ),
        (
            fp8.fused_adamw(1e-2, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda leaf: leaf.ndim > 1, p)),
            optax.adamw(1e-2, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda leaf: leaf.ndim > 1, p)),
        ),
    ],
    ids=["adam", "adamw", "schedule", "l2", "mask"],
)
def test_float32_is_optax(ours, theirs):
    (actual, state), (expected, _) = run(ours, tree(0)), run(theirs, tree(0))
    for name in SHAPES:
        np.testing.assert_allclose(actual[name], expected[name], rtol=2e-5, atol=2e-6)
    assert int(state.count) == 50
    assert jax.tree.leaves(state.master) == []
    moved = np.abs(np.asarray(actual["matrix"] - tree(0)["matrix"])).mean()
    assert moved > 1e-3  # the tolerance is far below what the steps did


def test_without_bias_correction_against_float64():
    b1, b2, eps, rate = 0.9, 0.999, 1e-8, 1e-2
    p, m, v = np.asarray(tree(0)["matrix"], np.float64), 0.0, 0.0
    for i in range(50):
        g = np.asarray(tree(100 + i)["matrix"], np.float64)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p - rate * m / (np.sqrt(v) + eps)
    actual, _ = run(fp8.fused_adam(rate, b1, b2, eps, bias_correction=False), tree(0))
    np.testing.assert_allclose(actual["matrix"], p, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("apply", [fp8.apply_updates, optax.apply_updates], ids=["fp8", "optax"])
def test_bfloat16_params_are_the_rounded_master_at_every_step(apply):
    tx, params, exact = fp8.fused_adamw(1e-3), tree(0, jnp.bfloat16), fp8.fused_adamw(1e-3)
    masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    state, exact_state = tx.init(params), exact.init(masters)
    for i in range(20):
        updates, state = tx.update(tree(100 + i), state, params)
        params = apply(params, updates)
        exact_updates, exact_state = exact.update(tree(100 + i), exact_state, masters)
        masters = fp8.apply_updates(masters, exact_updates)
        for name in SHAPES:
            np.testing.assert_array_equal(params[name], state.master[name].astype(jnp.bfloat16))
            np.testing.assert_array_equal(state.master[name], masters[name])


def test_small_updates_accumulate_where_optax_loses_them():
    params = {"w": jnp.full((4,), 1.0, jnp.bfloat16)}
    grads = {"w": jnp.full((4,), -1.0, jnp.bfloat16)}

    def twenty_steps(tx):
        state, p = tx.init(params), params
        for _ in range(20):
            updates, state = tx.update(grads, state, p)
            p = optax.apply_updates(p, updates)
        return float(p["w"][0])

    assert twenty_steps(optax.adamw(1e-3)) == 1.0
    assert twenty_steps(fp8.fused_adamw(1e-3)) == pytest.approx(1.02, abs=2**-8)


def test_mixed_trees_and_moment_dtypes():
    params = {"half": jnp.ones((3,), jnp.float16), "full": jnp.ones((3,)), "brain": jnp.ones((3,), jnp.bfloat16)}
    state = fp8.fused_adam(1e-3, mu_dtype=jnp.bfloat16, nu_dtype="float16").init(params)
    assert state.master["full"] is None
    assert state.master["half"].dtype == state.master["brain"].dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(state.mu)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.nu)} == {jnp.dtype(jnp.float16)}


def test_inject_hyperparams():
    tx = optax.inject_hyperparams(fp8.fused_adamw)(learning_rate=optax.constant_schedule(1e-2))
    (actual, state), (expected, _) = run(tx, tree(0), 5), run(fp8.fused_adamw(1e-2), tree(0), 5)
    np.testing.assert_allclose(actual["matrix"], expected["matrix"], rtol=1e-5, atol=1e-6)
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(1e-2)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_skip_nonfinite_changes_nothing(bad):
    params, grads = tree(0, jnp.bfloat16), tree(1)
    grads["vector"] = grads["vector"].at[2].set(bad)
    tx = fp8.fused_adamw(1e-2, skip_nonfinite=True)
    _, state = tx.update(tree(2), tx.init(params), params)
    updates, after = tx.update(grads, state, params)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    updates, after = fp8.fused_adamw(1e-2).update(grads, state, params)  # without it they propagate
    assert not np.isfinite(updates["vector"][2])
    assert int(after.count) == 2


@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_multi_transform_and_an_empty_share(skip_nonfinite):
    labels = dict.fromkeys(SHAPES, "ours") | {"vector": "frozen"}
    ours = fp8.fused_adamw(1e-2, skip_nonfinite=skip_nonfinite)
    tx = optax.multi_transform({"ours": ours, "frozen": optax.set_to_zero(), "nobody": ours}, labels)
    (actual, _), (expected, _) = run(tx, tree(0), 5), run(fp8.fused_adamw(1e-2), tree(0), 5)
    np.testing.assert_allclose(actual["matrix"], expected["matrix"], rtol=1e-6)
    np.testing.assert_array_equal(actual["vector"], tree(0)["vector"])


def test_misuse():
    params = tree(0)
    tx = fp8.fused_adam(1e-3)
    with pytest.raises(ValueError, match=r"call update\(grads, state, params\)"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match="grads must have the structure of params"):
        tx.update({"matrix": params["matrix"]}, tx.init(params), params)
    with pytest.raises(ValueError, match="floating point params, got int32"):
        tx.init({"ids": jnp.zeros((3,), jnp.int32)})
    with pytest.raises(ValueError, match="master_dtype must be one of"):
        fp8.fused_adam(1e-3, master_dtype=jnp.int8)
    with pytest.raises(ValueError, match="mu_dtype must be one of"):
        fp8.fused_adam(1e-3, mu_dtype=jnp.float8_e4m3fn)
