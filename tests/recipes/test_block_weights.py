"""Weights by tile in a cache: steps with one have the bits of steps that cast, whoever wrote it, and no step reads an
old one. The recipe keeps no state, so what is in FP8 is found by tracing the model once.
"""

from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from deltas import WARNS, by_deltas
from flax import serialization
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.core.cast import SQUARE
from jax_fp8.state.weight_cache import VERSION, cast_requests

BLOCK, OTHER = fp8.BlockScaling(), fp8.BlockScaling(power_2_scale=False, amax_epsilon=0.3)
RECIPES = {"block": BLOCK, "other formula": OTHER, "current": fp8.CurrentScaling()}
WIDTH = 160  # tiles at the end are cut
BATCH = np.random.default_rng(2).normal(size=(64, WIDTH)).astype(jnp.bfloat16)
FUSED = fp8.fused_adamw(1e-3)
OPTIMIZERS = {
    "fused": FUSED,
    "chained": optax.chain(optax.clip_by_global_norm(0.5), fp8.fused_adamw(1e-3)),
    "other moments": fp8.fused_adamw(1e-3, mu_dtype=jnp.bfloat16, nu_dtype=fp8.E4M3),
    "plain": optax.adamw(1e-3),
}


class Model(nn.Module):
    """An MLP, or attention, which has queries, keys and values side by side that share squares or not."""

    recipe: fp8.BlockScaling | fp8.CurrentScaling
    heads: int = 0

    @nn.compact
    def __call__(self, x):
        if self.heads:
            x = x + fp8.SelfAttention(self.heads, num_kv_heads=1, recipe=self.recipe)(x[None])[0]
        else:
            x = x + fp8.LayerNormMLP(96, recipe=self.recipe, name="mlp")(x)
        return fp8.Dense(48, recipe=self.recipe, name="out")(x)


def loss_of(model, variables, batch):
    return jnp.mean(jnp.square(model.apply(variables, batch)).astype(jnp.float32))


@cache
def initial_variables(model, seed=0, width=WIDTH):
    return dict(jax.jit(model.init)(jax.random.key(seed), BATCH[:, :width]))


@cache
def caster(model, width):
    """A program, for each of its operations would be one."""
    return jax.jit(lambda variables: fp8.cast_weights(
        variables, model.recipe, forward=lambda v: model.apply(v, BATCH[:, :width])
    ))  # fmt: skip


def cached_weights(model, variables, width=WIDTH):
    return caster(model, width)(variables)


@cache
def make_step(model, tx, microbatches=1, **settings):
    return fp8.make_train_step(partial(loss_of, model), tx, model.recipe, microbatches, **settings)


def start(model, tx, cached, seed=0, width=WIDTH):
    variables = dict(initial_variables(model, seed, width))
    if cached:
        variables["fp8_cache"] = cached_weights(model, variables, width)
    return fp8.TrainState.create(variables=variables, tx=tx)


def train(model, tx, cached, microbatches=1, width=WIDTH, **settings):
    state, step = start(model, tx, cached, width=width), make_step(model, tx, microbatches, **settings)
    losses = []
    for _ in range(4):
        state, metrics = step(state, BATCH[:, :width])
        losses.append(float(metrics["loss"]))
    assert losses[-1] != losses[0]
    return losses, state


def assert_same_trees(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(assert_same_bits, actual, expected)


def assert_same_training(ours, theirs):
    (losses, state), (expected, reference_state) = ours, theirs
    assert losses == expected
    assert_same_trees((state.params, state.opt_state), (reference_state.params, reference_state.opt_state))


def assert_is_what_casting_gives(model, state, width=WIDTH):
    without = {"params": state.params}
    assert_same_trees(state.cache, cached_weights(model, without, width))


# Every optimizer, and every recipe where the optimizer casts.
SLOW = [(recipe, tx) for recipe in ("other formula", "current") for tx in OPTIMIZERS if tx != "fused"]


@pytest.mark.parametrize(
    ("recipe", "tx"),
    [
        pytest.param(recipe, tx, marks=pytest.mark.slow if (recipe, tx) in SLOW else ())
        for recipe in RECIPES
        for tx in OPTIMIZERS
    ],
)
def test_cached_steps_have_the_bits_of_steps_that_cast(recipe, tx):
    model, tx = Model(RECIPES[recipe]), OPTIMIZERS[tx]
    ours = train(model, tx, cached=True)
    assert_same_training(ours, train(model, tx, cached=False))
    assert_is_what_casting_gives(model, ours[1])


@WARNS
@pytest.mark.parametrize("tx", [FUSED, by_deltas(FUSED)], ids=["in_place", "deltas"])
def test_microbatches(tx):
    model = Model(BLOCK)
    ours, theirs = (train(model, tx, cached, 4) for cached in (True, False))
    assert_same_training(ours, theirs)
    assert_is_what_casting_gives(model, ours[1])


QKV = tuple(("SelfAttention_0", name, "kernel") for name in ("query", "key", "value"))


@pytest.mark.parametrize(
    ("width", "heads", "are_written"), [(WIDTH, 10, False), (128, 1, True)], ids=["shared squares", "whole squares"]
)
def test_kernels_side_by_side(width, heads, are_written):
    """The optimizer writes those that have squares of their own; the others are cast behind it."""
    model = Model(BLOCK, heads)
    state = start(model, FUSED, cached=True, width=width)
    requests = cast_requests(state.cache, state.params, state.fp8)
    assert (QKV in requests) == are_written and ("out", "kernel") in requests
    ours, theirs = (train(model, FUSED, cached, width=width) for cached in (True, False))
    assert_same_training(ours, theirs)
    assert_is_what_casting_gives(model, ours[1], width)


def test_the_pieces_of_a_step():
    """The first microbatch casts, the others read what it cast."""
    model = Model(BLOCK)
    step, losses = make_step(model, FUSED, 4), []
    for cached in (True, False):
        state, of_steps = start(model, FUSED, cached), []
        pending = step.start(state)
        assert bool(pending.cache) == cached
        for _ in range(2):
            for i in range(4):
                pending = step.accumulate_step(state, pending, BATCH[i::4], is_first_microbatch=i == 0)
            state, pending, metrics = step.apply_step(state, pending)
            of_steps.append(float(metrics["loss"]))
        losses.append((of_steps, state.params))
        assert not cached or assert_is_what_casting_gives(model, state) is None
    assert losses[0][0] == losses[1][0] and losses[0][0][0] != losses[0][0][1]
    assert_same_trees(losses[0][1], losses[1][1])


def test_the_cache_is_read():
    """Negative control of all others: a cache of other params is cast again, and read where its version is forged."""
    model = Model(BLOCK)
    state, other = (start(model, FUSED, True, seed) for seed in (0, 1))
    step = make_step(model, FUSED, donate=False)
    forged = {**other.cache, VERSION: ~state.cache[VERSION]}  # of a state from elsewhere the step inverts it
    right, stale, wrong = (
        float(step(state.replace(cache=of), BATCH)[1]["loss"]) for of in (state.cache, other.cache, forged)
    )
    assert right == stale != wrong


def test_new_params_are_cast_again():
    model = Model(OTHER)
    state = start(model, FUSED, cached=True)
    replaced = jax.jit(lambda state: state.replace(params=jax.tree.map(lambda p: 1.25 * p, state.params)))(state)
    assert_is_what_casting_gives(model, replaced)
    with pytest.raises(AssertionError):
        assert_same_trees(replaced.cache, state.cache)


def test_a_skipped_step_changes_nothing():
    model, tx = Model(BLOCK), fp8.fused_adamw(1e-3, skip_nonfinite=True)
    step, state = make_step(model, tx, donate=False), start(model, tx, cached=True)
    bad = BATCH.copy()
    bad[3, 4] = np.nan
    skipped, _ = step(state, bad)
    assert_same_trees((skipped.params, skipped.cache), (state.params, state.cache))
    taken, _ = step(state, BATCH)
    assert not np.array_equal(taken.cache["out"]["kernel"].rowwise.values, state.cache["out"]["kernel"].rowwise.values)


def test_what_is_in_a_cache():
    model = Model(BLOCK)
    weights = cached_weights(model, initial_variables(model))
    pair, kernel = weights["mlp"]["up"]["kernel"], initial_variables(model)["params"]["mlp"]["up"]["kernel"]
    assert pair.rowwise.tile == pair.columnwise.tile == SQUARE
    assert pair.rowwise.scale.shape == pair.columnwise.scale.shape[::-1] == (2, -(-kernel.shape[1] // 128))
    assert_same_bits(pair.columnwise.values, pair.rowwise.values.T)
    assert_same_bits(pair.columnwise.scale, pair.rowwise.scale.T)
    corner = jnp.max(jnp.abs(kernel[128:, :128]))
    assert 0.5 < float(corner / 448 / pair.rowwise.scale[1, 0]) <= 1  # the scale is rounded up to a power of two
    assert float(pair.amax) == float(jnp.max(jnp.abs(kernel)))


@pytest.mark.parametrize(("scale", "is_first"), [(1, True), (1, False), (1.25, False)])
def test_in_a_loop_of_ones_own(scale, is_first):
    """Without a flag other params are noticed; a change that the version cannot see is not."""
    model = Model(BLOCK)
    kept = jax.jit(lambda *args: fp8.cast_weights(args[0], BLOCK, *args[1:]), donate_argnums=1)
    variables = jax.tree.map(lambda p: scale * p, initial_variables(model))
    kernel = variables["params"]["out"]["kernel"]
    variables["params"]["out"] = {**variables["params"]["out"], "kernel": kernel.at[5, 5].set(9)}
    old, new = (cached_weights(model, of) for of in (initial_variables(model), variables))
    assert not np.array_equal(old["out"]["kernel"].rowwise.scale, new["out"]["kernel"].rowwise.scale)
    found = kept(variables, jax.tree.map(jnp.array, old), is_first)
    assert_same_trees(found, new if is_first or scale != 1 else old)


def test_through_bytes():
    model = Model(BLOCK)
    state = start(model, FUSED, cached=True)
    restored = serialization.from_bytes(jax.tree.map(jnp.zeros_like, state), serialization.to_bytes(state))
    assert_same_trees(jax.tree.map(jnp.asarray, restored), state)


def test_layers_of_another_recipe_cast_their_own():
    class Mixed(nn.Module):
        recipe = BLOCK

        @nn.compact
        def __call__(self, x):
            x = fp8.Dense(WIDTH, recipe=fp8.CurrentScaling(), name="other")(x)
            return fp8.Dense(48, recipe=BLOCK, name="out")(x)

    model = Mixed()
    assert set(cached_weights(model, initial_variables(model))) == {"out", VERSION, "cast_by"}
    assert_same_training(*(train(model, FUSED, cached) for cached in (True, False)))


def test_stacked_layers():
    class Stack(nn.Module):
        recipe = BLOCK

        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, "fp8_cache": 0}
            scan = nn.scan(
                lambda layer, x, _: (layer(x), None), variable_axes=axes, split_rngs={"params": True}, length=2
            )
            return scan(fp8.Dense(WIDTH, recipe=BLOCK, name="layer"), x, None)[0]

    model = Stack()
    ours = train(model, FUSED, cached=True)
    assert_same_training(ours, train(model, FUSED, cached=False))
    assert_is_what_casting_gives(model, ours[1])


@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_on_a_mesh(axis):
    """A cache is of whole params, as with other recipes."""
    model, mesh = Model(BLOCK), jax.make_mesh((4,), (axis,))
    results = []
    for cached in (True, False):
        state, step = start(model, FUSED, cached), make_step(model, FUSED, parallel=mesh)
        if cached and axis == "fsdp":
            with pytest.raises(
                ValueError, match=r"a state that carries a weight cache must have whole params on every"
            ):
                step.place(state, BATCH)
            return
        state = step.place(state, BATCH)
        for _ in range(2):
            state, metrics = step(state, BATCH)
        results.append((float(metrics["loss"]), state.params))
        assert not cached or assert_is_what_casting_gives(model, jax.device_get(state)) is None
    assert_same_trees(*results)


def test_misuse():
    model = Model(BLOCK)
    variables = initial_variables(model)
    with pytest.raises(ValueError, match="must know which layers are in FP8, and BlockScaling leaves no trace of them"):
        fp8.cast_weights(variables, BLOCK)
    with pytest.raises(ValueError, match=r"forward must run layers with BlockScaling.*, got 3 other layers in FP8"):
        fp8.cast_weights(variables, OTHER, forward=lambda v: model.apply(v, BATCH))
    weights = cached_weights(model, variables)
    with pytest.raises(ValueError, match=r"cache must be what .*it was cast by BlockScaling.*, not by BlockScaling"):
        fp8.cast_weights(variables, OTHER, weights, False)
    with pytest.raises(ValueError, match=r"cache must be what cast_weights made of this model .* but it is empty"):
        fp8.cast_weights(variables, BLOCK, {}, False)
    one_scale = cached_weights(Model(fp8.CurrentScaling()), variables)
    with pytest.raises(ValueError, match="cache must be what cast_weights made of this model with this recipe, but"):
        fp8.cast_weights(variables, BLOCK, one_scale, False)
