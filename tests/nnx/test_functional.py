"""NNX models in `make_train_step`: the same steps as in a loop of one's own, and with all that it has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_layers import FEATURES, HIDDEN, MLP, RECIPE, RECIPES, X, assert_same, loss, make, values

import jax_fp8 as fp8
import jax_fp8.nnx
from jax_fp8.grads.loss_trace import LossTrace
from jax_fp8.grads.tape import added_by_gemms

pytestmark = pytest.mark.versions

TX = fp8.fused_adamw(1e-2)


def trained(model, recipe=RECIPE, steps=4, **options):
    """Losses of some steps, and the last state."""
    variables, merge = fp8.nnx.split(model)
    state = fp8.TrainState.create(variables=jax.tree.map(jnp.array, variables), tx=TX)
    step, losses = fp8.make_train_step(lambda v, x: loss(merge(v), x), TX, recipe, **options), []
    for _ in range(steps):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    return losses, state, merge


def test_a_model_is_its_variables_and_back():
    model = make()
    variables, merge = fp8.nnx.split(model)
    assert sorted(variables) == ["fp8", "params"] and sorted(variables["params"]["first"]) == ["bias", "kernel"]
    assert_same((variables["params"], variables["fp8"]), values(model))
    other = fp8.nnx.split(make(seed=1))[0]
    made = merge(other)
    assert_same(values(made), (other["params"], other["fp8"]))
    made.first.kernel[...] = jnp.zeros((FEATURES, HIDDEN))
    assert_same(values(model), (variables["params"], variables["fp8"]))  # another model
    assert np.any(merge(other).first.kernel[...])


def test_steps_are_those_of_a_loop_of_ones_own():
    model = make()
    fp8.nnx.warm_start(loss)(model, X)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = fp8.nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        fp8.nnx.update_state(model)
        return value

    expected = [float(step(model, optimizer, X)) for _ in range(4)]
    losses, state, merge = trained(make())
    assert losses == expected
    assert_same(values(merge(state.variables)), values(model))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_microbatches_with_a_weight_cache_and_without(recipe):
    """What is cast once for all microbatches has the same values as what each casts: a layer finds its weight."""
    of_model = lambda: MLP(nnx.Rngs(0), recipe=recipe)  # noqa: E731
    cached, _, _ = trained(of_model(), recipe, microbatches=2)
    uncached, _, _ = trained(of_model(), recipe, microbatches=2, cache_weights=False)
    assert cached == uncached
    whole, _, _ = trained(of_model(), recipe)
    assert np.allclose(cached, whole, rtol=0.02) and cached != whole


def test_gemms_are_found_by_their_kernels():
    """So a cache, sums of gradients and diagnostics know them, also without state."""
    variables, merge = fp8.nnx.split(make())
    added = added_by_gemms(variables["fp8"], variables["params"])
    assert sorted(added) == [("first", "kernel"), ("second", "kernel")]
    assert sorted(fp8.cast_weights(variables, RECIPE)) == ["cast_by", "first", "params_version", "second"]
    current, merge = fp8.nnx.split(MLP(nnx.Rngs(0), recipe=fp8.CurrentScaling()))
    assert current["fp8"] == {}
    assert [*LossTrace.from_function(lambda v, x: loss(merge(v), x), current, X).gemms] == [("first",), ("second",)]


def test_a_cached_weight_is_read():
    """The control: one that is not the kernel's changes the result."""
    variables, merge = fp8.nnx.split(make())
    cache = fp8.cast_weights(variables, RECIPE)
    expected = merge(variables)(X)
    np.testing.assert_array_equal(merge({**variables, "fp8_cache": cache})(X), expected)
    other = fp8.cast_weights({**variables, "params": fp8.nnx.split(make(seed=1))[0]["params"]}, RECIPE)
    assert np.any(merge({**variables, "fp8_cache": other})(X) != expected)


def test_diagnostics_and_deferred_gradients():
    variables, merge = fp8.nnx.split(make())
    step = fp8.make_train_step(lambda v, x: loss(merge(v), x), TX, RECIPE)
    found = step.diagnose(fp8.TrainState.create(variables=variables, tx=TX), X)
    assert {row["layer"] for row in found.rows()["tensors"]} == {"first", "second"}
    value_and_grad = fp8.value_and_grad(lambda v, x: loss(merge(v), x), delay_wgrad_compute=True)
    _, grads, _, deferred = jax.jit(value_and_grad)(variables, X)
    assert not np.any(grads["first"]["kernel"])
    _, expected, _ = jax.jit(fp8.value_and_grad(lambda v, x: loss(merge(v), x)))(variables, X)
    assert_same(jax.tree.map(jnp.add, grads, fp8.backward_dw(deferred)), expected)


def test_products_are_explained_by_the_paths_of_their_layers():
    variables, merge = fp8.nnx.split(make())
    found = fp8.explain(lambda v, x: loss(merge(v), x), variables, X)
    assert [gemm.layer for gemm in found if gemm.is_fp8] == ["first/fprop", "second/fprop"]


class WithStatistics(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.dense = fp8.nnx.Linear(FEATURES, FEATURES, recipe=RECIPE, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(FEATURES, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


def test_batch_statistics_and_dropout_in_a_step():
    """Those of a loop of one's own; and other masks in each step."""
    seeds, masks = {"dropout": jax.random.key(3)}, []

    def loss_fn(variables, x, rngs):
        model = merge(variables)
        nnx.reseed(model, **rngs)
        y = model(x)
        aux = {"batch_stats": fp8.nnx.batch_stats(model), "kept": y[0] != 0}
        return jnp.mean(jnp.square(y.astype(jnp.float32) - x)), aux

    model = WithStatistics()
    variables, merge = fp8.nnx.split(model)
    assert sorted(variables) == ["batch_stats", "fp8", "params"] and sorted(variables["batch_stats"]["norm"]) == [
        "mean",
        "var",
    ]
    state = fp8.TrainState.create(variables=variables, tx=TX)
    step = fp8.make_train_step(loss_fn, TX, RECIPE, has_aux=True, rngs=seeds)
    state, metrics = step(state, X)
    assert not np.any(model.norm.mean[...])  # the model that was split is left alone
    model(X)
    stats = jax.tree.map(np.array, state.collections["batch_stats"]["norm"])
    np.testing.assert_allclose(stats["mean"], model.norm.mean[...], 0.05, 1e-3)  # but for the scales of the first step
    masks.append(metrics["aux"]["kept"])
    state, metrics = step(state, X)
    assert np.any(metrics["aux"]["kept"] != masks[0])
    assert np.sum(np.abs(state.collections["batch_stats"]["norm"]["mean"])) > 1.5 * np.sum(np.abs(stats["mean"]))
    assert_same(fp8.nnx.batch_stats(merge(state.variables)), state.collections["batch_stats"])
    without = {name: tree for name, tree in state.variables.items() if name != "batch_stats"}
    assert_same(fp8.nnx.batch_stats(merge(without)), variables["batch_stats"])
