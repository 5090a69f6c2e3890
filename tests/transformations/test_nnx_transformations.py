"""NNX models under Flax's transformations, and split over devices: every layer has the state that is its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from nnx_layers import FEATURES, MLP, RECIPE, X, assert_same, loss, make, mean_square, pure, staged, values

import jax_fp8 as fp8
import jax_fp8.nnx

pytestmark = pytest.mark.versions

differentiate = nnx.jit(fp8.nnx.value_and_grad(loss))


class Stack(nnx.Module):
    """Three layers made by `nnx.vmap`, run by `nnx.scan`; or, `unrolled`, one after the other."""

    def __init__(self, rngs, remat=False):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return MLP(rngs, recipe=RECIPE)

        self.layers, self.remat = create(rngs), remat

    def __call__(self, x):
        def body(x, layer):
            return jnp.tanh(layer(x))

        body = nnx.remat(body) if self.remat else body
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class Unrolled(nnx.Module):
    def __init__(self, stack):
        graphdef, state = nnx.split(stack.layers)
        parts = [jax.tree.map(lambda leaf, i=i: leaf[i], state) for i in range(3)]
        self.layers = nnx.List([nnx.merge(graphdef, part) for part in parts])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


@pytest.mark.parametrize("remat", [False, True], ids=["scan", "scan and remat"])
def test_scanned_layers_each_have_their_own(remat):
    stack = Stack(nnx.Rngs(0), remat)
    unrolled = Unrolled(stack)
    assert stack.layers.first.fp8.scale.shape == (3, 3)
    for _ in range(2):
        (found, grads), (expected, expected_grads) = differentiate(stack, X), differentiate(unrolled, X)
        assert found == expected
        amaxes, of_each = staged(stack), staged(unrolled)
        for name in ("first", "second"):
            each = np.stack([of_each[f"layers/{i}/{name}"] for i in range(3)])
            np.testing.assert_array_equal(amaxes[f"layers/{name}"], each)
            assert len(np.unique(each[:, 2])) == 3
            kernels = np.stack([pure(expected_grads)["layers"][i][name]["kernel"] for i in range(3)])
            np.testing.assert_array_equal(pure(grads)["layers"][name]["kernel"], kernels)
        fp8.nnx.update_state(stack)
        fp8.nnx.update_state(unrolled)


def test_remat_changes_nothing():
    model, other = make(), make()
    results = [differentiate(model, X), nnx.jit(fp8.nnx.value_and_grad(lambda m, x: nnx.remat(loss)(m, x)))(other, X)]
    assert results[0][0] == results[1][0]
    assert_same(pure(results[0][1]), pure(results[1][1]))
    assert_same(values(model), values(other))


def test_a_batched_axis_that_shares_the_state_stages_its_maximum():
    def vmapped(model, x):
        each = nnx.vmap(lambda model, rows: model(rows), in_axes=(None, 0))(model, x.reshape(2, 32, FEATURES))
        return mean_square(each.reshape(x.shape), x)

    model, other = make(), make()
    _, grads = nnx.jit(fp8.nnx.value_and_grad(vmapped))(model, X)
    _, expected = differentiate(other, X)
    assert_same(staged(model), staged(other))
    reference.assert_close(pure(grads)["first"]["kernel"], pure(expected)["first"]["kernel"], "bfloat16")


def test_axes_may_be_said_by_the_type_of_state():
    """What stands beside the state while gradients are taken has its type, and goes its way."""
    axes = nnx.StateAxes({nnx.Param: 0, fp8.nnx.Fp8State: 0, ...: None})

    def scanned(stack, x):
        body = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry)
        return mean_square(body(x, stack.layers), x)

    stack, other = Stack(nnx.Rngs(0)), Stack(nnx.Rngs(0))
    assert nnx.jit(fp8.nnx.value_and_grad(scanned))(stack, X)[0] == differentiate(other, X)[0]
    assert_same(staged(stack), staged(other))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_batch_split_over_devices_stages_the_maximum_of_all(axis_type):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(axis_type,))
    model, other = make(), make()
    whole = NamedSharding(mesh, PartitionSpec())
    nnx.update(model, jax.tree.map(lambda leaf: jax.device_put(leaf, whole), nnx.state(model)))
    found, _ = differentiate(model, jax.device_put(X, NamedSharding(mesh, PartitionSpec("data"))))
    expected, _ = differentiate(other, X)
    reference.assert_close(found, expected, "bfloat16")
    assert_same(staged(model), staged(other))


def test_tree_mode():
    """Flax's mode in which modules are pytrees, without sharing."""
    expected, _ = differentiate(other := make(), X)
    with nnx.set_graph_mode(False):
        model = make()
        found, grads = nnx.jit(fp8.nnx.value_and_grad(loss))(model, X)
    assert found == expected and np.any(pure(grads)["first"]["kernel"])
    assert_same(staged(model), staged(other))


def test_an_ensemble_has_states_of_its_own():
    ensemble = nnx.vmap(lambda key: MLP(nnx.Rngs(key), recipe=RECIPE))(jax.random.split(jax.random.key(0), 3))
    scales = jnp.asarray([1, 2, 4], X.dtype)[:, None, None]

    def vmapped(models, x):
        return jnp.sum(nnx.vmap(loss, in_axes=(0, 0))(models, scales * x))

    nnx.jit(fp8.nnx.value_and_grad(vmapped))(ensemble, X)
    np.testing.assert_array_equal(staged(ensemble)["first"][:, 0], np.float32([1, 2, 4]) * reference.amax(X))


def test_a_branch_that_does_not_run_stages_nothing():
    class Choice(nnx.Module):
        def __init__(self):
            self.a, self.b = make(0), make(1)

        def __call__(self, x, take_a):
            return nnx.cond(take_a, lambda self, x: self.a(x), lambda self, x: self.b(x), self, x)

    model = Choice()
    run = nnx.jit(fp8.nnx.value_and_grad(lambda model, x, take_a: mean_square(model(x, take_a), x)))
    run(model, X, jnp.bool_(True))
    found = staged(model)
    assert np.all(found["a/first"] > 0) and not np.any(found["b/first"])
    expected = make(0)
    differentiate(expected, X)
    np.testing.assert_array_equal(found["a/second"], staged(expected)["second"])
