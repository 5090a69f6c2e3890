"""`freeze`: frozen params keep every bit and have no state, inside of a step and outside."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8

PARAMS = {"layer": {"kernel": jnp.ones((4, 4)), "lora_a": jnp.ones((4, 2))}, "bias": jnp.ones(4)}
GRADS = jax.tree.map(lambda p: 0.5 * p, PARAMS)


def changed(tx, grads=GRADS):
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    new = fp8.apply_updates(PARAMS, updates)
    return {name for (name, old), (_, own) in zip(named(PARAMS), named(new), strict=True) if np.any(old != own)}


def named(tree):
    return [
        ("/".join(key.key for key in path), np.asarray(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


@pytest.mark.parametrize("tx", [fp8.fused_adamw(1e-2, weight_decay=0.1), optax.adamw(1e-2), optax.sgd(0.1)])
def test_a_rule_says_which_params_are_frozen(tx):
    everything = {"layer/kernel", "layer/lora_a", "bias"}
    assert changed(tx) == everything
    assert changed(fp8.freeze(tx, "kernel")) == everything - {"layer/kernel"}
    assert changed(fp8.freeze(tx, "^layer/")) == {"bias"}
    assert changed(fp8.freeze(tx, trained="lora_")) == {"layer/lora_a"}
    assert changed(fp8.freeze(tx, lambda path: path == "bias")) == everything - {"bias"}
    assert changed(fp8.freeze(tx, trained=lambda path: path == "bias")) == {"bias"}
    assert changed(fp8.freeze(tx, ".")) == set()


def test_frozen_params_have_no_state():
    size = sum(leaf.size for leaf in jax.tree.leaves(fp8.freeze(fp8.fused_adamw(1e-2), trained="lora_").init(PARAMS)))
    assert size == 1 + 2 * 8  # a count, and two moments of (4, 2)


def test_transforms_inside_see_the_other_gradients_alone():
    """A norm over frozen gradients too would be larger."""
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    updates, _ = (tx := fp8.freeze(clipped, trained="lora_")).update(GRADS, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(optax.tree.norm(updates), 0.1, rtol=1e-6)
    outside = optax.chain(optax.clip_by_global_norm(0.1), fp8.freeze(optax.sgd(1.0), trained="lora_"))
    updates, _ = outside.update(GRADS, outside.init(PARAMS), PARAMS)
    assert optax.tree.norm(updates) < 0.09


def step_and_state(tx, **options):
    layer = fp8.Dense(32, use_bias=False)
    x = jax.random.normal(jax.random.key(0), (64, 32))
    params = {"one": layer.init(jax.random.key(1), x)["params"], "two": layer.init(jax.random.key(2), x)["params"]}
    plain = layer.clone(recipe=None)

    def loss_fn(variables, x):
        y = plain.apply({"params": variables["params"]["one"]}, x)
        return jnp.mean(jnp.square(plain.apply({"params": variables["params"]["two"]}, y).astype(jnp.float32) - x))

    return (
        fp8.make_train_step(loss_fn, tx, None, **options),
        fp8.TrainState.create(variables={"params": params}, tx=tx),
        x,
    )


@pytest.mark.parametrize("microbatches", [1, 2])
def test_in_a_step(microbatches, recwarn):
    """It works in place, with skips too, and gives the trained params the bits that they have without frozen ones."""
    step, state, x = step_and_state(fp8.freeze(fp8.fused_adamw(1e-2), "^two/"), microbatches=microbatches)
    before = jax.tree.map(np.asarray, state.params)
    state, _ = step(state, x)
    np.testing.assert_array_equal(state.params["two"]["kernel"], before["two"]["kernel"])
    assert np.all(state.params["one"]["kernel"] != before["one"]["kernel"])
    free, free_state, _ = step_and_state(fp8.fused_adamw(1e-2), microbatches=microbatches)
    np.testing.assert_array_equal(state.params["one"]["kernel"], free(free_state, x)[0].params["one"]["kernel"])
    kept = jax.tree.map(np.asarray, state)
    state, metrics = step(state, x, skip_above=-1.0)
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, kept.params)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, kept.opt_state)
    assert not recwarn.list


@pytest.mark.parametrize("rules", [{"frozen": "embed_tokens"}, {"trained": "adapter"}, {"frozen": lambda path: False}])
def test_a_rule_that_matches_nothing_is_refused(rules):
    """A misspelt one would freeze nothing, or everything."""
    with pytest.raises(ValueError, match=r"must match at least one param, got .* such as 'bias'"):
        fp8.freeze(optax.sgd(0.1), **rules).init(PARAMS)


@pytest.mark.parametrize(
    "rules, sentence",
    [
        ({}, "one rule, frozen or trained, got none"),
        ({"frozen": "a", "trained": "b"}, "one rule, frozen or trained, got both"),
        ({"frozen": "("}, "must be a regular expression"),
        ({"trained": 3}, "must be a regular expression or a function"),
    ],
)
def test_bad_rules(rules, sentence):
    with pytest.raises(ValueError, match=sentence):
        fp8.freeze(optax.sgd(0.1), **rules)
