"""Delayed weight gradients of every kind of layer, however it is called, are the ordinary ones.

Where each kernel has one GEMM the sums are made in the same order, and all bits are equal. So they are where a layer is
called several times: its products are added in the order of the backward pass.
"""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import hybrid
import jax
import jax.numpy as jnp
import layers
import pytest
from delayed import add, assert_same_gradients, delayed, differentiate, is_noticed, kernels_of, without_one
from jax import lax
from layers import FEATURES, RECIPE, weighted_sum
from recipes.test_planted_recipe import PowerOfFourByTile

import jax_fp8 as fp8

CURRENT = fp8.CurrentScaling()
X, WEIGHTS = layers.inputs()


class Stack(nn.Module):
    """Layers of every kind that has FP8 GEMMs: norm_linear, attention with grouped queries, a gated norm_mlp."""

    recipe: fp8.DelayedScaling | fp8.CurrentScaling | PowerOfFourByTile = RECIPE
    recompute: bool = False
    width: int = 64

    @nn.compact
    def __call__(self, x):
        how = {"recipe": self.recipe, "recompute": self.recompute}
        x = fp8.LayerNormDense(self.width, norm="rmsnorm", **how)(x)
        x = fp8.TransformerBlock(4, 2 * self.width, num_kv_heads=2, activation="swiglu", **how)(x)
        return fp8.Dense(FEATURES, use_bias=False, **how)(x)


class ThreeUses(nn.Module):
    """One layer, called on 16, on 16 and on 32 rows."""

    @nn.compact
    def __call__(self, x):
        layer = layers.dense(name="dense")
        return layer(nn.tanh(layer(x))) + layer(jnp.concatenate([x, 2 * x]))[len(x) :]


class Turns(nn.Module):
    """Three stacked layers, each called twice; or three turns of one."""

    recipe: fp8.DelayedScaling | fp8.CurrentScaling = RECIPE
    shared: bool = False

    @nn.compact
    def __call__(self, x):
        recipe = self.recipe

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                dense = fp8.Dense(FEATURES, recipe=recipe, name="dense")
                return nn.tanh(dense(nn.tanh(dense(x)))), None

        collections = ("params", "fp8")
        how = {"variable_broadcast": collections} if self.shared else {"variable_axes": dict.fromkeys(collections, 0)}
        scan = nn.scan(Layer, **how, split_rngs={"params": not self.shared}, length=3)
        return scan(name="layers")(x, None)[0]


MODULES = {
    "tower": layers.Chain(),
    "two calls": layers.Chain(shared=True),
    "three calls": ThreeUses(),
    "remat": layers.Chain(remat=True),
    "two calls, remat": layers.Chain(shared=True, remat=True),
    "scan": layers.Scanned(),
    "scan of remat": layers.Scanned(remat=True),
    "scan, two calls": Turns(),
    "scan, two calls, current": Turns(CURRENT),
    "scan, two calls, block": Turns(fp8.BlockScaling()),
    "scan of one layer": Turns(shared=True),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", MODULES)
def test_a_layer_however_it_is_called(name):
    module = MODULES[name]
    variables = jax.jit(module.init)(jax.random.key(1), X)
    wanted, grads, deferred = differentiate(weighted_sum(module), variables, X, WEIGHTS)
    assert delayed(grads) == kernels_of(grads)  # biases are gradients of the pass
    assert_same_gradients(jax.jit(add)(grads, deferred), wanted, 1e-6 if name.endswith("current") else 0)
    assert is_noticed(grads, without_one(deferred), wanted)


@pytest.mark.versions
def test_a_call_of_several_left_out_is_noticed():
    """Negative control: of a layer that is called twice, the half."""
    module = MODULES["two calls"]
    wanted, grads, deferred = differentiate(
        weighted_sum(module), jax.jit(module.init)(jax.random.key(1), X), X, WEIGHTS
    )
    ((x, dy),) = deferred.operands
    half = replace(deferred, operands=((jax.tree.map(lambda leaf: leaf.at[1:].set(0), x), dy),))
    assert x.shape == (2, FEATURES, 16) and is_noticed(grads, half, wanted)


@pytest.mark.parametrize(
    ("recipe", "recompute"),
    [
        pytest.param(RECIPE, True, id="delayed", marks=pytest.mark.versions),
        pytest.param(CURRENT, False, id="current"),
        pytest.param(fp8.BlockScaling(), False, id="block"),
    ],
)
def test_all_kinds_of_layers(recipe, recompute):
    module = Stack(recipe, recompute)
    x, weights = (array.reshape(2, 16, FEATURES) for array in layers.inputs(rows=32))
    variables = jax.jit(module.init)(jax.random.key(1), x)
    wanted, grads, deferred = differentiate(weighted_sum(module), variables, x, weights)
    assert delayed(grads) == kernels_of(grads) and len(deferred.operands) == 6
    assert_same_gradients(jax.jit(add)(grads, deferred), wanted, 1e-6)
    assert all(is_noticed(grads, without_one(deferred, i), wanted) for i in range(6))


def test_scales_by_tile():
    """Where only a reference multiplies, it does so later."""
    module = fp8.Dense(128, recipe=PowerOfFourByTile())
    x, weights = jax.random.normal(jax.random.key(0), (2, 128, 128))
    wanted, grads, deferred = differentiate(
        weighted_sum(module), jax.jit(module.init)(jax.random.key(1), x), x, weights
    )
    assert delayed(grads) == ["kernel"] and deferred.operands[0][0].scale.shape == (128, 1)
    assert_same_gradients(jax.jit(add)(grads, deferred), wanted, 1e-6)


def test_a_head_in_fp8_is_not_delayed():
    """Its loss makes the gradient of the logits in parts: to keep these would be to keep the logits."""
    model = hybrid.gpt(CURRENT, head_recipe=CURRENT, num_layers=1)
    tokens = hybrid.tokens(2)
    variables = jax.jit(model.init)(jax.random.key(1), tokens[:, :-1])
    wanted, grads, deferred = differentiate(fp8.next_token_loss(model), variables, tokens)
    assert delayed(grads) == kernels_of(grads) and len(deferred.operands) == 4
    assert_same_gradients(jax.jit(add)(grads, deferred), wanted, 1e-6)


def penalised(loss, variables, *given):
    return loss(variables, *given) + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(variables["params"]))


def with_a_plain_use(loss, variables, x, weights):
    """The kernel is a matrix of the loss, too, as where an embedding is the head."""
    kernel = variables["params"]["first"]["kernel"]
    return loss(variables, x, weights) + jnp.sum((x @ kernel.astype(x.dtype)).astype(jnp.float32) * weights)


def with_one_kernel(loss, variables, *given):
    """Two layers, one kernel."""
    params = variables["params"]
    return loss({**variables, "params": {"first": params["first"], "second": params["first"]}}, *given)


def twice_by_one_trace(loss, variables, x, weights):
    """jax traces a jitted function once for both calls."""
    jitted = jax.jit(loss)
    return jitted(variables, x, weights) + jitted(variables, 2 * x, weights)


def in_a_branch_too(loss, variables, x, weights):
    """The gradients of the branch are those of the pass."""
    branch = lax.cond(x[0, 0] < 100, lambda: loss(variables, 2 * x, weights), lambda: 0.0)
    return loss(variables, x, weights) + branch


WAYS = {
    "penalty": (penalised, ()),
    "plain use": (with_a_plain_use, ("second/kernel",)),
    "one kernel": (with_one_kernel, ("first/kernel",)),
    "one trace": (twice_by_one_trace, ("first/kernel", "second/kernel")),
    "branch": (in_a_branch_too, ()),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", WAYS)
def test_what_reaches_a_kernel_on_several_ways(name):
    way, all_delayed = WAYS[name]
    module = layers.Chain()
    variables = jax.jit(module.init)(jax.random.key(1), X)
    if way is with_one_kernel:
        del variables["params"]["second"]
    wanted, grads, deferred = differentiate(partial(way, weighted_sum(module)), variables, X, WEIGHTS)
    assert delayed(grads) == list(all_delayed) and len(deferred.operands) == 2
    assert_same_gradients(jax.jit(add)(grads, deferred), wanted, 1e-6)
    assert is_noticed(grads, without_one(deferred, 0), wanted) and is_noticed(grads, without_one(deferred, 1), wanted)
