"""A step of microbatches has the same bits scanned, unrolled or called, with weights cast once or every time."""

import functools
import gc
import warnings
from unittest.mock import Mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import jax_fp8 as fp8
from jax_fp8.grads.loss_trace import LossTrace
from jax_fp8.train import programs

RECIPE = fp8.DelayedScaling(amax_history_len=4)
BATCH = jax.random.normal(jax.random.key(2), (128, 32), jnp.bfloat16)
RECORDED = optax.trace(0.0)  # keeps the gradients it was given
ADAM = optax.chain(RECORDED, optax.clip_by_global_norm(0.5), fp8.fused_adamw(1e-2))
STILL = optax.chain(RECORDED, optax.sgd(0.0))


class Model(nn.Module):
    """Three layers, the second used twice, and a kernel that a GEMM and the loss both use."""

    @nn.compact
    def __call__(self, x):
        x = x + fp8.LayerNormMLP(48, recipe=RECIPE, name="mlp")(x)
        twice = fp8.Dense(32, recipe=RECIPE, name="twice")
        return fp8.Dense(32, recipe=RECIPE, name="out")(nn.relu(twice(nn.relu(twice(x)))))


MODEL = Model()
VARIABLES = dict(jax.jit(MODEL.init)(jax.random.key(0), BATCH))


def loss_fn(variables, batch):
    penalty = jnp.sum(jnp.square(variables["params"]["out"]["kernel"]))
    return jnp.mean(jnp.square(MODEL.apply(variables, batch).astype(jnp.float32))) + 1e-3 * penalty


def mean_square(module):
    return lambda variables, batch: jnp.mean(jnp.square(module.apply(variables, batch).astype(jnp.float32)))


def start(tx=ADAM, cached=False):
    variables = jax.tree.map(jnp.array, VARIABLES)  # a step takes its buffers
    if cached:
        variables["fp8_cache"] = fp8.cast_weights(variables, RECIPE)
    return fp8.TrainState.create(variables=variables, tx=tx)


def new_step(microbatches, tx=ADAM, **settings):
    return fp8.make_train_step(loss_fn, tx, RECIPE, microbatches, **{"warm_start": False} | settings)


make_step = functools.cache(new_step)  # compiled once for all tests


def scanned(microbatches, cached=False, steps=3, tx=ADAM, make=make_step, **settings):
    step, state, losses = make(microbatches, tx=tx, **settings), start(tx, cached), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return losses, state


def driven(microbatches, first=lambda i: i == 0, steps=3, tx=ADAM, **settings):
    """By the caller; `first` says what it tells of microbatch i."""
    step, state, losses = make_step(microbatches, tx=tx, **settings), start(tx), []
    pending = step.start(state)
    for _ in range(steps):
        for i in range(microbatches):
            pending = step.accumulate_step(state, pending, BATCH[i::microbatches], first(i))
        state, pending, metrics = step.apply_step(state, pending)
        losses.append(float(metrics["loss"]))
    return losses, state


def unrolled_scan(body, carry, xs):
    for i in range(jax.tree.leaves(xs)[0].shape[0]):
        carry, _ = body(carry, jax.tree.map(lambda x: x[i], xs))  # noqa: B023
    return carry, None


def gradients_of(state):
    return state.opt_state[0].trace


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    for name in ("params", "fp8", "opt_state"):
        jax.tree.map(reference.assert_same_bits, getattr(ours[1], name), getattr(theirs[1], name))


def test_every_way_has_the_same_bits(monkeypatch):
    microbatches = 4
    expected = scanned(microbatches)
    assert len(set(expected[0])) == 3  # it trains
    assert all(np.any(g) for g in jax.tree.leaves(gradients_of(expected[1])))
    assert_same(scanned(microbatches, cache_weights=False), expected)
    assert_same(scanned(microbatches, cached=True), expected)
    for cache_weights in (True, False):
        assert_same(driven(microbatches, cache_weights=cache_weights), expected)
    unrolled = Mock(wraps=unrolled_scan)
    monkeypatch.setattr(programs.lax, "scan", unrolled)
    assert_same(scanned(microbatches, make=new_step), expected)
    assert unrolled.called


def test_one_microbatch_driven():
    (_, state), (_, expected) = driven(1, steps=1), scanned(1, steps=1)
    jax.tree.map(reference.assert_same_bits, state.fp8, expected.fp8)
    for ours, theirs in zip(*map(jax.tree.leaves, (gradients_of(state), gradients_of(expected))), strict=True):
        reference.assert_close(ours, theirs, "float32")


def test_gradients_are_those_of_the_microbatches():
    """Against the mean of one pass each, for the layer used twice and the kernel that the loss uses too."""
    _, state = driven(4, steps=1)
    one_pass = jax.jit(fp8.value_and_grad(loss_fn))
    passes = [one_pass(start().variables, BATCH[i::4])[1] for i in range(4)]
    means = jax.tree.map(lambda *g: np.mean(np.stack(g).astype(np.float64), axis=0), *passes)
    jax.tree.map(lambda ours, mean: reference.assert_close(ours, mean, "float32"), gradients_of(state), means)
    for wrong in (passes[0], jax.tree.map(lambda g: 2 * g, means)):  # one microbatch only, and everything twice
        with pytest.raises(AssertionError, match="relative error"):
            reference.assert_close(gradients_of(state)["twice"]["kernel"], wrong["twice"]["kernel"], "float32")


def test_repeated_steps_give_the_same_gradients():
    """Buffers are used again and again; nothing of the step before may be left in them, or lost."""
    step, state = make_step(4, tx=STILL), start(STILL)
    scales = jax.device_get(state.fp8)
    pending, found = step.start(state), []
    for _ in range(3):
        for i in range(4):
            pending = step.accumulate_step(state, pending, BATCH[i::4], i == 0)
        state, pending, _ = step.apply_step(state, pending)
        found.append(jax.device_get(gradients_of(state)))
        state = state.replace(fp8=jax.tree.map(jnp.array, scales))
    assert all(np.any(g) for g in jax.tree.leaves(found[0]))
    for later in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, later, found[0])


def test_nothing_compiles_when_the_flag_changes():
    step, state = new_step(2), start()
    pending = step.start(state)
    for _ in range(2):
        for i in range(2):
            flag = jnp.bool_(i == 0) if i else i == 0
            pending = step.accumulate_step(state, pending, BATCH[i::2], flag)
        state, pending, _ = step.apply_step(state, pending)
    sizes = [program._cache_size() for program in (step._start, step._accumulate, step._apply)]
    assert sizes == [1, 1, 1]


def test_a_forgotten_flag_begins_anew():
    """After an optimizer step the sums and weights belong to another state, whatever the caller says."""
    assert_same(driven(2, first=lambda _: False), driven(2))


def test_overwritten_params_begin_anew():
    def run(overwrite):
        step, state = make_step(2), start()
        pending = step.start(state)
        pending = step.accumulate_step(state, pending, BATCH[::2], True)
        if overwrite:
            state = state.replace(params=jax.tree.map(lambda p: 1.25 * p, state.params))
        pending = step.accumulate_step(state, pending, BATCH[1::2], False)
        return state, pending, step

    _, untouched, _ = run(overwrite=False)
    assert int(untouched.count) == 2
    state, pending, step = run(overwrite=True)
    assert int(pending.count) == 1  # the first belongs to other params
    before = jax.device_get(state.params)
    expected = fp8.cast_weights(state.variables, RECIPE)
    jax.tree.map(reference.assert_same_bits, pending.cache, expected)
    state, _, metrics = step.apply_step(state, pending)
    assert np.isnan(metrics["loss"])
    assert int(metrics["microbatches"]) == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, before)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_step_takes_all_its_microbatches_or_none(count):
    step, state = make_step(2), start()
    before = jax.device_get(state)
    pending = step.start(state)
    for i in range(count):
        pending = step.accumulate_step(state, pending, BATCH[::2], i == 0)
    state, pending, metrics = step.apply_step(state, pending)
    assert np.isnan(metrics["loss"])
    assert int(metrics["microbatches"]) == count
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
    for i in range(2):  # and it can go on
        pending = step.accumulate_step(state, pending, BATCH[i::2], False)
    state, _, metrics = step.apply_step(state, pending)
    assert int(state.step) == 1
    assert np.isfinite(metrics["loss"])


def test_gradients_are_not_used_twice():
    step, state = make_step(1), start()
    pending = step.accumulate_step(state, step.start(state), BATCH, True)
    state, pending, _ = step.apply_step(state, pending)
    state, _, metrics = step.apply_step(state, pending)
    assert (int(state.step), np.isnan(metrics["loss"])) == (1, True)


@pytest.mark.parametrize("recipe", [fp8.CurrentScaling(), fp8.BlockScaling(), None], ids=["current", "block", "bf16"])
def test_recipes_without_state(recipe):
    """Weights cast once or every time: the same bits. The caller's loop, where no GEMM adds, may round once more."""
    module, tx = fp8.LayerNormMLP(48, recipe=recipe), optax.chain(RECORDED, optax.sgd(0.1))

    def state():
        return fp8.TrainState.create(variables=module.init(jax.random.key(0), BATCH), tx=tx)

    step = fp8.make_train_step(mean_square(module), tx, recipe, 4)
    expected, _ = step(state(), BATCH)
    assert all(np.any(g) for g in jax.tree.leaves(gradients_of(expected)))
    uncached, _ = fp8.make_train_step(mean_square(module), tx, recipe, 4, cache_weights=False)(state(), BATCH)
    jax.tree.map(reference.assert_same_bits, uncached, expected)
    ours = state()
    pending = step.start(ours)
    for i in range(4):
        pending = step.accumulate_step(ours, pending, BATCH[i::4], i == 0)
    ours, _, _ = step.apply_step(ours, pending)
    jax.tree.map(lambda a, b: reference.assert_close(a, b, "float32"), ours.params, expected.params)


def test_the_layers_of_a_recipe_without_state_are_found():
    recipe = fp8.CurrentScaling()

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.remat(fp8.LayerNormMLP)(48, recipe=recipe, name="mlp")(x)
            x = fp8.Dense(32, recipe=None, name="plain")(x)
            layers = nn.scan(
                lambda layer, x, _: (layer(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            return layers(fp8.Dense(32, recipe=recipe, name="stacked"), x, None)[0]

    module = Stack()
    loss = mean_square(module)

    variables = module.init(jax.random.key(0), BATCH)
    for _ in range(2):  # nothing is remembered
        trace = LossTrace.from_function(loss, variables, BATCH)
        assert sorted(trace.gemms) == [("mlp", "down"), ("mlp", "up"), ("stacked",)]
    tx = optax.chain(RECORDED, optax.sgd(0.1))
    results = []
    for cache_weights in (True, False):
        state = fp8.TrainState.create(variables=jax.tree.map(jnp.array, variables), tx=tx)
        results.append(fp8.make_train_step(loss, tx, recipe, 2, cache_weights=cache_weights)(state, BATCH)[0])
    jax.tree.map(reference.assert_same_bits, *results)


def test_a_rematerialised_layer_stages_once():
    class Remat(nn.Module):
        remat: bool

        @nn.compact
        def __call__(self, x):
            block = nn.remat(fp8.LayerNormMLP) if self.remat else fp8.LayerNormMLP
            return block(48, recipe=RECIPE, name="mlp")(x)

    results = []
    for remat in (True, False):
        module = Remat(remat)

        state = fp8.TrainState.create(variables=module.init(jax.random.key(0), BATCH), tx=STILL)
        step = fp8.make_train_step(mean_square(module), STILL, RECIPE, 2, warm_start=False)
        results.append(step(state, BATCH)[0])
    with_remat, without = results
    jax.tree.map(reference.assert_same_bits, with_remat.fp8, without.fp8)
    jax.tree.map(lambda a, b: reference.assert_close(a, b, "float32"), gradients_of(with_remat), gradients_of(without))


def test_misuse():
    step, state = make_step(2), start()
    pending = step.start(state)
    for flag in (1, "yes", None, jnp.int32(1), jnp.ones((2,), bool)):
        with pytest.raises(ValueError, match=r"is_first_microbatch must be a bool or an array bool\[\], got"):
            step.accumulate_step(state, pending, BATCH[::2], flag)
    kept = make_step(2, donate=False)
    with pytest.warns(UserWarning, match=r"accumulate_step copies what it adds to, 0\.\d MiB a microbatch"):
        kept.accumulate_step(state, pending, BATCH[::2], True)
    with warnings.catch_warnings(action="error"):
        step.accumulate_step(state, pending, BATCH[::2], True)


def test_a_long_run_compiles_nothing_and_keeps_its_memory():
    """500 steps of two microbatches, scanned, and as many driven by the caller."""
    module, tx = fp8.Dense(32, recipe=RECIPE), fp8.fused_adamw(1e-3)
    x = BATCH[:32]

    def loss(variables, batch):
        return jnp.mean(jnp.square((module.apply(variables, batch) - batch).astype(jnp.float32)))

    def scan(step, state, pending):
        state, metrics = step(state, x)
        return state, pending, metrics

    def drive(step, state, pending):
        for i in range(2):
            pending = step.accumulate_step(state, pending, x[i::2], i == 0)
        return step.apply_step(state, pending)

    for run in (scan, drive):
        step = fp8.make_train_step(loss, tx, RECIPE, 2)
        state = fp8.TrainState.create(variables=module.init(jax.random.key(0), x), tx=tx)
        pending = step.start(state) if run is drive else None
        gc.collect()
        live, losses = [], []
        for i in range(500):
            state, pending, metrics = run(step, state, pending)
            if i % 250 in (9, 249):
                losses.append(float(metrics["loss"]))
                live.append(sum(array.nbytes for array in jax.live_arrays()))
        assert losses[-1] < 0.5 * losses[0]
        programs = (step._step, step._warm, step._start, step._accumulate, step._apply)
        assert [program._cache_size() for program in programs] == ([1, 1, 0, 0, 0] if run is scan else [0, 0, 1, 1, 1])
        assert live[-1] <= live[0], live
