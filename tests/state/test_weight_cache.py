"""Cached steps have the bits of steps that cast, whoever wrote the cache; an old cache is never read for new params."""

import warnings
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from deltas import WARNS, by_deltas

import jax_fp8 as fp8
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.scale import scale_from_amax
from jax_fp8.core.state import map_gemms
from jax_fp8.state.weight_cache import VERSION, cast_requests

RECIPE = fp8.DelayedScaling(amax_history_len=3)
BATCH = jax.random.normal(jax.random.key(2), (64, 32), jnp.bfloat16)
KERNELS = 3
CHAIN = optax.chain(optax.clip_by_global_norm(0.5), fp8.fused_adamw(1e-3))


class Model(nn.Module):
    features: int = 32

    @nn.compact
    def __call__(self, x):
        x = x + fp8.LayerNormMLP(64, recipe=RECIPE, name="mlp")(x)
        return fp8.Dense(self.features, recipe=RECIPE, name="out")(x)


MODEL = Model()


def loss_of(module):
    return lambda variables, batch: jnp.mean(jnp.square(module.apply(variables, batch)).astype(jnp.float32))


def frozen_kernels(tx):
    """Weights that the optimizer never sees still change their scale."""
    labels = partial(jax.tree_util.tree_map_with_path, lambda path, _: "kernel" in str(path))
    return optax.multi_transform({True: optax.set_to_zero(), False: tx}, labels)


OPTIMIZERS = {
    "fused": fp8.fused_adamw(1e-3),
    "chained": CHAIN,
    "schedule, bfloat16 moments": fp8.fused_adamw(
        optax.linear_schedule(0, 1e-3, 4), mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16
    ),
    "plain optax": optax.adamw(1e-3),
    "frozen": frozen_kernels(fp8.fused_adamw(1e-3)),
}


@cache
def initial_variables(seed=0):
    return dict(jax.jit(MODEL.init)(jax.random.key(seed), BATCH))


@cache
def make_step(tx, microbatches=1, **settings):
    """Compiled once for all tests."""
    return fp8.make_train_step(loss_of(MODEL), tx, RECIPE, microbatches, **settings)


def start(tx, cached, seed=0):
    variables = jax.tree.map(jnp.array, initial_variables(seed))  # a step takes its buffers
    if cached:
        variables["fp8_cache"] = fp8.cast_weights(variables, RECIPE)
    return fp8.TrainState.create(variables=variables, tx=tx)


def train(tx, cached, steps=5, microbatches=1):
    state = start(tx, cached)
    warm_start = microbatches > 1  # one way with and one without
    step = make_step(tx, microbatches, warm_start=warm_start)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[-1] != losses[0]
    return losses, state


def assert_same_training(ours, theirs):
    (losses, state), (expected, reference_state) = ours, theirs
    assert losses == expected
    for name in ("params", "fp8", "opt_state"):
        assert_same_trees(getattr(state, name), getattr(reference_state, name))


def assert_same_trees(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        reference.assert_same_bits(ours, theirs)


@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_cached_steps_have_the_bits_of_steps_that_cast(tx):
    assert_same_training(train(tx, cached=True), train(tx, cached=False))


@pytest.mark.versions
@WARNS
@pytest.mark.parametrize("tx", [CHAIN, by_deltas(CHAIN)], ids=["in_place", "deltas"])
def test_microbatches(tx):
    assert_same_training(train(tx, True, microbatches=4), train(CHAIN, False, microbatches=4))


def test_the_cache_is_what_casting_gives():
    _, state = train(OPTIMIZERS["fused"], cached=True)
    assert_same_trees(state.cache, fp8.cast_weights(state.variables, RECIPE))
    kernels = [leaf for leaf in jax.tree.leaves(state.cache, is_leaf=lambda x: isinstance(x, Fp8Pair))]
    assert sum(isinstance(kernel, Fp8Pair) for kernel in kernels) == KERNELS
    assert len(kernels) == KERNELS + 1  # and the version


def test_the_cache_is_read():
    """Negative control of all others: another cache gives another loss."""
    state = start(CHAIN, cached=True)
    other = start(CHAIN, cached=True, seed=1)
    step = make_step(CHAIN, donate=False, warm_start=False)
    right = step(state, BATCH)[1]["loss"]
    forged = {**other.cache, VERSION: ~state.cache[VERSION]}  # of a state from elsewhere the step inverts it
    wrong = step(state.replace(cache=forged), BATCH)[1]["loss"]
    assert float(right) != float(wrong)


def test_overwritten_params_are_cast_again():
    tx = OPTIMIZERS["fused"]
    step = make_step(tx, donate=False, warm_start=False)
    results = []
    for cached in (True, False):
        state, _ = step(start(tx, cached), BATCH)
        state = state.replace(params=jax.tree.map(lambda p: 1.25 * p, state.params))
        results.append(step(state, BATCH))
    (cached_state, cached_metrics), (state, metrics) = results
    assert float(cached_metrics["loss"]) == float(metrics["loss"])
    assert_same_trees(cached_state.params, state.params)


def test_a_skipped_step_changes_no_state():
    tx = fp8.fused_adamw(1e-3, skip_nonfinite=True)
    module = fp8.Dense(32, recipe=RECIPE)

    def loss(variables, batch):
        return jnp.mean(jnp.square(module.apply(variables, batch)).astype(jnp.float32))

    step = fp8.make_train_step(loss, tx, RECIPE, donate=False, warm_start=False)
    x = jax.random.normal(jax.random.key(0), (16, 32), jnp.bfloat16)
    variables = dict(module.init(jax.random.key(1), x))
    state = fp8.TrainState.create(variables={**variables, "fp8_cache": fp8.cast_weights(variables, RECIPE)}, tx=tx)
    state, _ = step(state, x)
    skipped, metrics = step(state, x.at[3, 4].set(jnp.nan))
    assert not np.isfinite(float(metrics["loss"]))
    for name in ("params", "fp8", "opt_state", "cache"):
        assert_same_trees(getattr(skipped, name), getattr(state, name))
    taken, _ = step(skipped, x)
    assert not np.array_equal(taken.params["kernel"], state.params["kernel"])


def test_stacked_layers():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                lambda layer, x, _: (layer(x), None),
                variable_axes={"params": 0, "fp8": 0, "fp8_cache": 0},
                split_rngs={"params": True},
                length=3,
            )
            return layers(fp8.Dense(32, recipe=RECIPE, name="layer"), x, None)[0]

    module, tx = Stack(), OPTIMIZERS["fused"]
    x = jax.random.normal(jax.random.key(0), (16, 32), jnp.bfloat16)

    def loss(variables, batch):
        return jnp.mean(jnp.square(module.apply(variables, batch)).astype(jnp.float32))

    step = fp8.make_train_step(loss, tx, RECIPE, warm_start=False)
    results = []
    for cached in (True, False):
        variables = dict(module.init(jax.random.key(1), x))
        cache = {"fp8_cache": fp8.cast_weights(variables, RECIPE)} if cached else {}
        state = fp8.TrainState.create(variables={**variables, **cache}, tx=tx)
        for _ in range(3):
            state, _ = step(state, x)
        results.append(state)
    assert_same_trees(results[0].params, results[1].params)
    assert_same_trees(results[0].fp8, results[1].fp8)


def without_queries(tx):
    """An optimizer that sees keys and values only cannot write what the three share."""
    labels = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "query" in str(path), params)  # noqa: E731
    return optax.multi_transform({True: optax.set_to_zero(), False: tx}, labels)


@pytest.mark.parametrize("wrap", [lambda tx: tx, without_queries], ids=["written", "cast_after"])
def test_kernels_side_by_side(wrap):
    module = fp8.TransformerBlock(
        num_heads=4, num_kv_heads=2, mlp_hidden_features=96, activation="swiglu", recipe=RECIPE
    )
    x, tx = jax.random.normal(jax.random.key(0), (2, 16, 64), jnp.bfloat16), wrap(fp8.fused_adamw(1e-3))
    step = fp8.make_train_step(loss_of(module), tx, RECIPE, warm_start=False)
    variables = dict(module.init(jax.random.key(1), x))
    cache = fp8.cast_weights(variables, RECIPE)
    groups = {kernels for kernels in cast_requests(cache, variables["params"], variables["fp8"]) if len(kernels) == 3}
    assert (
        ("attention", "query", "kernel"),
        ("attention", "key", "kernel"),
        ("attention", "value", "kernel"),
    ) in groups
    results = []
    for collections in ({**variables, "fp8_cache": cache}, variables):
        state = fp8.TrainState.create(variables=jax.tree.map(jnp.array, collections), tx=tx)
        for _ in range(3):
            state, _ = step(state, x)
        results.append(state)
    assert_same_trees(*((state.params, state.fp8, state.opt_state) for state in results))
    assert_same_trees(results[0].cache, fp8.cast_weights(results[0].variables, RECIPE))


def test_scale_and_amax_are_the_weights():
    variables = initial_variables()
    cache = fp8.cast_weights(variables, RECIPE)
    kernel, cached = variables["params"]["mlp"]["up"]["kernel"], cache["mlp"]["up"]["kernel"]
    assert float(cached.amax) == float(jnp.max(jnp.abs(kernel)))
    assert float(cached.rowwise.scale) == float(scale_from_amax(cached.amax, fp8.E4M3))
    reference.assert_same_bits(cached.rowwise.values, fp8.quantize(kernel, fp8.E4M3, cached.rowwise.scale).values)
    reference.assert_same_bits(cached.columnwise.values, cached.rowwise.values.T)


@partial(jax.jit, donate_argnums=1)
def kept_or_cast(variables, cache, first=None):
    return fp8.cast_weights(variables, RECIPE, cache, first)


def other_scales(variables):
    """The same params with scales that are not those they were cast with."""
    return {**variables, "fp8": map_gemms(lambda gemm: {**gemm, "scale": 2 * gemm["scale"]}, variables["fp8"])}


@pytest.mark.parametrize("first", [True, False, None])
def test_the_flag(first):
    variables = initial_variables()
    old, new = fp8.cast_weights(variables, RECIPE), fp8.cast_weights(other_scales(variables), RECIPE)
    assert not np.array_equal(old["out"]["kernel"].rowwise.values, new["out"]["kernel"].rowwise.values)
    given = jax.tree.map(jnp.array, old)
    for flag in (first, first if first is None else jnp.bool_(first)):
        result = kept_or_cast(other_scales(variables), given, flag)
        assert_same_trees(result, new if first else old)  # a later change of scales does not touch what is kept
        given = result


def changed(variables, change):
    return {**variables, "params": change(jax.tree.map(jnp.array, variables["params"]))}


def with_row(params):
    return params | {"out": params["out"] | {"kernel": params["out"]["kernel"].at[7].set(0.5)}}


def with_column(params):
    return params | {"out": params["out"] | {"kernel": params["out"]["kernel"].at[:, 7].multiply(1.0001)}}


def stepped(params):
    updates, _ = optax.sgd(1e-6).update(params, optax.sgd(1e-6).init(params))
    return optax.apply_updates(params, updates)


@pytest.mark.parametrize("change", [stepped, with_row, with_column], ids=lambda change: change.__name__)
def test_a_stale_cache_is_cast_again_whatever_the_flag(change):
    variables = initial_variables()
    cache = fp8.cast_weights(variables, RECIPE)
    overwritten = changed(variables, change)
    expected = fp8.cast_weights(overwritten, RECIPE)
    with pytest.raises(AssertionError):
        assert_same_trees(cache, expected)
    assert_same_trees(kept_or_cast(overwritten, cache, False), expected)


def test_a_state_put_together_from_parts_reads_no_stale_weights():
    tx = OPTIMIZERS["fused"]
    step = make_step(tx, donate=False, warm_start=False)
    ours, other = start(tx, cached=True), start(tx, cached=False, seed=1)
    mixed = fp8.TrainState(other.step, other.params, other.fp8, other.opt_state, ours.cache)
    (state, metrics), (expected, expected_metrics) = step(mixed, BATCH), step(other, BATCH)
    assert float(metrics["loss"]) == float(expected_metrics["loss"])
    assert_same_trees(state.params, expected.params)


def test_outside_jit_the_cost_is_said():
    variables = initial_variables()
    cache = fp8.cast_weights(variables, RECIPE)
    with pytest.warns(
        UserWarning, match=r"cast_weights copies the cache .* 0\.0 MiB a call; call it in a jitted function"
    ):
        fp8.cast_weights(variables, RECIPE, cache, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept_or_cast(variables, cache, False)


def test_misuse():
    variables = initial_variables()
    with pytest.raises(ValueError, match='needs a recipe and "params", with DelayedScaling also "fp8", of a model'):
        fp8.cast_weights({"params": variables["params"]}, RECIPE)
    cache = fp8.cast_weights(variables, RECIPE)
    for flag in (1, "first", jnp.int32(1), jnp.ones((1,), bool)):
        with pytest.raises(
            ValueError, match=r"is_first_microbatch must be a bool or an array bool\[\], got .*; pass `i == 0`"
        ):
            fp8.cast_weights(variables, RECIPE, cache, flag)
    e5m2 = jax.tree.map(lambda x: x.astype(fp8.E5M2) if x.dtype == fp8.E4M3 else x, cache)
    wider = fp8.cast_weights(Model(features=48).init(jax.random.key(0), BATCH), RECIPE)
    for wrong in ({}, e5m2, wider, {**cache, "extra": jnp.zeros(3)}):
        with pytest.raises(
            ValueError, match="cache must be what cast_weights made of this model with this recipe, but"
        ):
            fp8.cast_weights(variables, RECIPE, wrong, False)
    other = Model(features=48).init(jax.random.key(0), BATCH)
    with pytest.raises(ValueError, match="the weight cache must hold float8_e4m3fn of shape"):
        MODEL.apply({**variables, "fp8_cache": fp8.cast_weights(other, RECIPE)}, BATCH)
