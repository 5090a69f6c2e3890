"""Equinox's linear layers in FP8, with a stand-in for Equinox; tests/hosts/equinox_check.py has the real one."""

import dataclasses
import pickle
import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.integrations import equinox

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=4)
X = jax.random.normal(jax.random.key(1), (4, 16, 32))


def field(static=False, **options):
    return dataclasses.field(metadata={"static": static}, **options)


class Module:
    """What the layers need of `eqx.Module`: classes that derive from it are dataclasses, and trees of their fields."""

    def __init_subclass__(cls):
        dataclasses.dataclass(cls, eq=False)
        static = [each.name for each in dataclasses.fields(cls) if each.metadata.get("static")]
        others = [each.name for each in dataclasses.fields(cls) if each.name not in static]

        def flatten(module):
            children = [(jax.tree_util.GetAttrKey(name), getattr(module, name)) for name in others]
            return children, tuple(getattr(module, name) for name in static)

        def unflatten(values, children):
            module = object.__new__(cls)
            vars(module).update(zip((*others, *static), (*children, *values), strict=True))
            return module

        jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)


class Linear(Module):
    weight: jax.Array
    bias: jax.Array | None
    in_features: int | str = field(static=True)
    out_features: int | str = field(static=True)
    use_bias: bool = field(static=True)

    def __init__(self, in_features, out_features, use_bias=True, dtype=None, *, key):
        sizes = (1 if size == "scalar" else size for size in (out_features, in_features))
        self.weight = 0.2 * jax.random.normal(key, tuple(sizes), dtype or jnp.float32)
        self.bias = jnp.zeros(self.weight.shape[:1], self.weight.dtype) if use_bias else None
        self.in_features, self.out_features, self.use_bias = in_features, out_features, use_bias

    def __call__(self, x, *, key=None):
        y = self.weight @ x
        return y if self.bias is None else y + self.bias


class Embedding(Module):
    weight: jax.Array


class MLP(Module):
    embedding: Embedding
    layers: list
    first: Linear
    odd: Linear

    def __call__(self, x):
        for layer in (self.first, *self.layers):
            x = jnp.sin(layer(x))
        return x


@pytest.fixture
def host(monkeypatch):
    module = ModuleType("equinox")
    module.Module, module.field = Module, field
    module.nn = SimpleNamespace(Linear=Linear)
    monkeypatch.setitem(sys.modules, "equinox", module)
    equinox._linear_type.cache_clear()
    yield module
    equinox._linear_type.cache_clear()


def make():
    keys = jax.random.split(jax.random.key(0), 4)
    layers = [Linear(48, 32, key=keys[0]), Linear(32, 16, False, key=keys[1])]
    return MLP(Embedding(jnp.ones((10, 32))), layers, Linear(32, 48, key=keys[2]), Linear(32, 10, key=keys[3]))


def loss(model, x):
    return jnp.mean(jax.vmap(jax.vmap(model))(x) ** 2)


def test_layers_are_swapped_and_the_others_are_listed(host):
    model, listing = equinox.in_fp8(make(), RECIPE, lambda path: path != "layers.1")
    assert listing.in_fp8 == ("layers.0", "first")
    assert listing.left == {
        "layers.1": "not asked for",
        "odd": "10 columns are no multiple of 16",
        "embedding": "Embedding without FP8",
    }
    assert isinstance(model.first, Linear) and isinstance(model.first, equinox.Linear)
    assert type(model.layers[1]) is Linear and model.first.weight is not None
    again = equinox.in_fp8(model, RECIPE)[1]
    assert again.in_fp8 == ("layers.1",) and again.left["first"] == "in FP8 already"
    scalar = Linear("scalar", 16, key=jax.random.key(0))
    assert equinox.in_fp8([scalar], RECIPE)[1].left == {"0": "scalar features"}
    assert [equinox.in_fp8(make(), RECIPE, where)[1].in_fp8 for where in (r"layers\.\d", ["first"])] == [
        ("layers.0", "layers.1"),
        ("first",),
    ]


def test_a_step_is_that_of_whole_batches(host):
    """The gradients and states of a model of single examples are those of `dot_general` on all rows."""
    model, _ = equinox.in_fp8(make(), RECIPE)
    new_states, grads = equinox.split(jax.jit(jax.grad(loss))(model, X))

    def whole(weights, states):
        x = X
        for layer, weight, state in zip(layers, weights, states, strict=True):
            y = fp8.dot_general(x, weight, (((2,), (1,)), ((), ())), recipe=RECIPE, state=state)
            x = jnp.sin(y if layer.bias is None else y + layer.bias)
        return jnp.mean(x**2)

    layers = [model.first, *model.layers]
    states = [{"scale": each.fp8.scale, "amax_history": each.fp8.amax_history} for each in layers]
    expected, expected_states = jax.jit(jax.grad(whole, (0, 1)))([each.weight for each in layers], states)
    for number, (gradient, state) in enumerate(zip(expected, expected_states, strict=True)):
        found = [grads.first, *grads.layers][number], [new_states.first, *new_states.layers][number].fp8
        np.testing.assert_allclose(found[0].weight, gradient, rtol=1e-5, atol=1e-8)
        np.testing.assert_array_equal(found[1].amax_history, state["amax_history"])
        np.testing.assert_array_equal(found[1].scale, state["scale"])
        assert found[0].fp8 is None and found[1].passes == 1 and np.all(state["amax_history"][:, -1] > 0)


def test_training(host):
    model, _ = equinox.in_fp8(make(), RECIPE)
    step = jax.jit(jax.value_and_grad(loss))
    losses = []
    for _ in range(5):
        value, grads = step(model, X)
        new_states, grads = equinox.split(grads)
        model = equinox.apply_updates(model, jax.tree.map(lambda gradient: -gradient, grads), new_states)
        losses.append(float(value))
    assert losses[-1] < 0.9 * losses[0]
    assert np.all(model.first.fp8.amax_history[:, -3:] > 0)
    # A layer that was not run keeps its state. A control: histories stay empty where new states are thrown away.
    kept = equinox.apply_updates(model, None, jax.tree.map(jnp.zeros_like, new_states))
    np.testing.assert_array_equal(kept.first.fp8.scale, model.first.fp8.scale)
    assert not np.any(equinox.apply_updates(equinox.in_fp8(make(), RECIPE)[0], grads, None).first.fp8.amax_history)


def test_gradients_that_are_added_or_divided(host):
    """What other people's steps do to gradients they do to states: the next pass undoes it."""
    layer = equinox.Linear(32, 16, key=jax.random.key(0), recipe=RECIPE)
    new = jax.grad(lambda layer: jnp.mean(jax.vmap(layer)(X[0]) ** 2))(layer).fp8
    expected = new.of_one_pass()
    for factor in (3, 0.25):
        scaled = jax.tree.map(lambda leaf: leaf * factor, new)  # noqa: B023
        found = scaled.of_one_pass()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
        assert not np.allclose(scaled.scale, expected["scale"])
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), new)
    assert cast.of_one_pass()["scale"].dtype == jnp.float32


def test_a_layer_that_is_used_twice(host):
    layer = equinox.Linear(32, 32, False, key=jax.random.key(0), recipe=RECIPE)

    def used_twice(layer, convert):
        layer = convert(layer)
        return jnp.mean(jax.vmap(lambda x: layer(100 * layer(x)))(X[0]))

    middle = jax.vmap(layer)(X[0])
    amaxes = [float(jnp.max(jnp.abs(each))) for each in (X[0], 100 * middle)]
    for convert, expected in ((equinox.by_maximum, max(amaxes)), (lambda layer: layer, sum(amaxes) / 2)):
        new = jax.jit(jax.grad(used_twice), static_argnums=1)(layer, convert).fp8.of_one_pass()
        np.testing.assert_allclose(new["amax_history"][0, -1], expected, rtol=0.05)


def test_stacked_layers_have_a_state_each(host):
    keys = jax.random.split(jax.random.key(0), 3)
    stacked = jax.vmap(lambda key: Linear(32, 32, key=key))(keys)
    swapped, _ = equinox.in_fp8(stacked, RECIPE)
    made = jax.vmap(lambda key: equinox.Linear(32, 32, key=key, recipe=RECIPE))(keys)
    for layers in (swapped, made):
        assert layers.fp8.scale.shape == (3, 3) and len({*layers.fp8.scale[:, 1].tolist()}) == 3

        def run(layers):
            x, _ = jax.lax.scan(lambda x, layer: (jax.vmap(layer)(x), None), X[0], layers)
            return jnp.mean(x**2)

        new, _ = equinox.split(jax.grad(run)(layers))
        assert new.fp8.passes.tolist() == [1, 1, 1] and np.all(new.fp8.amax_history[:, :, -1] > 0)


def test_the_layer_takes_batches_and_is_pickled(host):
    layer = equinox.Linear(32, 16, key=jax.random.key(0), recipe=fp8.CurrentScaling())
    assert layer.fp8 is None
    np.testing.assert_array_equal(layer(X), jax.vmap(jax.vmap(layer))(X))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(layer))(X), layer(X))


def test_what_is_refused(host):
    key = jax.random.key(0)
    layer = equinox.Linear(32, 16, key=key, recipe=RECIPE)
    with pytest.raises(ValueError, match=r"Linear takes \(..., 32\), got \(16, 48\); transpose or reshape"):
        layer(jnp.ones((16, 48)))
    with pytest.raises(ValueError, match="Linear in FP8: scalar features; pad"):
        equinox.Linear("scalar", 16, key=key)
    with pytest.raises(ValueError, match="10 columns are no multiple of 16; pad them, or use eqx"):
        equinox.Linear(16, 10, key=key)
    with pytest.raises(ValueError, match="in_fp8 needs a recipe, got None"):
        equinox.in_fp8(layer, None)
    with pytest.raises(ValueError, match="where must be a regular expression, last names of layers, or a function"):
        equinox.in_fp8(layer, RECIPE, 3)
    with pytest.raises(ValueError, match="updates must hold no FP8 states, got some; split gradients before"):
        equinox.apply_updates(layer, layer, None)
    with pytest.raises(ValueError, match=r"Linear\(32, 16\): the weight gradient contracts .*multiple of 16, got 1"):
        jax.vmap(jax.grad(lambda layer, x: jnp.sum(layer(x))), (None, 0))(layer, X[0])
    with pytest.raises(AttributeError, match="no attribute 'Line'"):
        _ = equinox.Line


def test_without_the_host():
    equinox._linear_type.cache_clear()
    with pytest.raises(ImportError, match="this function needs equinox, which is not installed; pip install equinox"):
        equinox.in_fp8({}, RECIPE)
    with pytest.raises(ImportError, match="pip install equinox"):
        _ = equinox.Linear
