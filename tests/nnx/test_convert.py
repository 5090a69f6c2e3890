"""A model of Flax's layers becomes one in FP8: the same parameters, another product, and a list of what was left."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx
from nnx_layers import RECIPE, X, assert_same, pure

import jax_fp8 as fp8
import jax_fp8.nnx

pytestmark = pytest.mark.versions


class Own(nnx.Linear):
    """Somebody's layer, of which nobody knows what it does."""


class Model(nnx.Module):
    """Layers in every kind of container, one shared, and some that FP8 must leave."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(32, 64, rngs=rngs)
        self.listed = nnx.List([nnx.Linear(64, 64, use_bias=False, rngs=rngs), nnx.relu])
        self.named = nnx.Dict({"a": nnx.Linear(64, 64, rngs=rngs)})
        self.sequence = nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), nnx.relu)
        self.plain_list = nnx.data([nnx.Linear(32, 32, rngs=rngs)])
        self.plain_dict = nnx.data({"b": (nnx.Linear(32, 32, rngs=rngs),)})
        self.shared = self.plain_list[0]
        self.own = Own(32, 32, rngs=rngs)
        self.precise = nnx.Linear(32, 32, precision="highest", rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = self.named.a(self.listed[1](self.listed[0](self.first(x))))
        x = self.plain_dict["b"][0](self.plain_list[0](self.sequence(x)))
        x = self.precise(self.own(self.shared(x)))
        return self.head(x + self.attention(x[None])[0])


PROJECTIONS = [f"attention/{name}" for name in ("key", "out", "query", "value")]
CONVERTED = [*PROJECTIONS, "first", "listed/0", "named/a", "plain_dict/b/0", "plain_list/0", "sequence/layers/0"]


def params(model):
    return nnx.to_flat_state(nnx.state(model, nnx.Param))


def test_layers_are_swapped_in_place_and_parameters_stay():
    model, other = Model(), Model()
    before = dict(params(model))
    first, shared = model.first.kernel, model.shared
    result = fp8.nnx.convert(model, RECIPE)
    assert sorted(result.converted) == CONVERTED
    assert model.first.kernel is first and isinstance(model.first, fp8.nnx.Linear)
    assert model.shared is model.plain_list[0] and model.shared is not shared
    after = dict(params(model))
    assert after.keys() == before.keys()
    assert_same(
        {path: value[...] for path, value in after.items()}, {path: value[...] for path, value in before.items()}
    )
    x = X.astype(jnp.float32)
    y, expected = model(x), other(x)
    assert y.dtype == expected.dtype == jnp.float32
    assert np.any(y != expected)  # it is another product
    reference.assert_close(y, expected, "block")


def test_what_was_left_is_said_with_reasons():
    left = fp8.nnx.convert(Model(), RECIPE).left
    assert left["head"] == "FP8 needs features divisible by 16, got 32 to 10"
    assert left["own"] == "its class is Own, none that convert knows"
    assert left["precise"] == "has its own precision"
    assert sorted(left) == ["head", "own", "precise"]
    assert "head: left as it is, FP8 needs features" in str(fp8.nnx.convert(Model(), RECIPE))


def test_a_layer_with_adapters_is_left_with_them():
    """As qwix adds them, as variables beside the kernel: an FP8 layer would lose them."""
    model = Model()
    layer = model.first
    layer.kernel_lora_b = nnx.LoRAParam(jnp.ones((4, 32)))
    layer.kernel_lora_a = nnx.LoRAParam(jnp.ones((32, 4)))
    result = fp8.nnx.convert(model, RECIPE)
    assert model.first is layer and hasattr(layer, "kernel_lora_a")
    assert result.left["first"] == "has variables that Linear does not have, kernel_lora_a and kernel_lora_b"
    assert sorted(result.converted) == [name for name in CONVERTED if name != "first"]


def test_a_model_that_qwix_takes_up_later_warns():
    """qwix sets this attribute of every module, and finds no product of its kind in an FP8 layer."""
    layer = fp8.nnx.Linear(32, 48, recipe=RECIPE, rngs=nnx.Rngs(0))
    layer(X)  # the control: no warning
    layer.fp8.qwix_path = ("first",)
    with pytest.warns(
        UserWarning, match=r"Linear\(32, 48\) is in FP8, so qwix gives it no adapter .* apply qwix first"
    ):
        layer(X)


@pytest.mark.parametrize(
    "where", [nnx.Not(nnx.PathContains("first")), lambda path, layer: path != ("first",)], ids=["filter", "function"]
)
def test_a_filter_says_which(where):
    model = Model()
    result = fp8.nnx.convert(model, RECIPE, where)
    assert (
        sorted(result.converted) == [name for name in CONVERTED if name != "first"]
        and result.left["first"] == "not asked for"
    )
    assert type(model.first) is nnx.Linear
    assert isinstance(model.named.a, fp8.nnx.Linear)


def test_a_second_call_changes_nothing():
    model = Model()
    fp8.nnx.convert(model, RECIPE)
    layer = model.first
    assert fp8.nnx.convert(model, RECIPE).converted == () and model.first is layer


def test_an_optimizer_made_before_stays_right():
    model = Model()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    def loss(model, x):
        return jnp.mean(jnp.square(model(x)))

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = fp8.nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        fp8.nnx.update_state(model)
        return value

    before = pure(nnx.state(model, nnx.Param))
    fp8.nnx.convert(model, RECIPE)
    fp8.nnx.warm_start(loss)(model, X)
    losses = [float(step(model, optimizer, X)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: np.any(a != b), before, pure(nnx.state(model, nnx.Param)))))


def test_stacked_layers_are_swapped_too():
    class Stack(nnx.Module):
        def __init__(self):
            self.layers = nnx.vmap(lambda key: nnx.Linear(32, 32, rngs=nnx.Rngs(key)))(
                jax.random.split(jax.random.key(0), 3)
            )

        def __call__(self, x):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    model, other = Stack(), Stack()
    fp8.nnx.convert(model, RECIPE)
    assert model.layers.fp8.scale.shape == (3, 3)
    x = X.astype(jnp.float32)
    reference.assert_close(model(x), other(x), "block")


def test_a_dtype_is_kept():
    model = nnx.Sequential(nnx.Linear(32, 32, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    fp8.nnx.convert(model)
    assert model(X.astype(jnp.float32)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp8.nnx.convert(nnx.Linear(32, 32, rngs=nnx.Rngs(0))), "convert swaps the layers inside of a model"),
        (lambda: fp8.nnx.convert({"a": 3}), "convert swaps the layers inside of a model, got dict"),  # type: ignore
        (lambda: fp8.nnx.convert(Model(), None), "convert needs a recipe, got None"),  # type: ignore
        (lambda: fp8.nnx.convert(Model(), "fp8"), "recipe must be DelayedScaling"),  # type: ignore
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
