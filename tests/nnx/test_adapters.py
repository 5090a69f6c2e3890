"""Adapters of NNX layers: those of Linen bit for bit, on kernels that are params or frozen in FP8, and merged."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from nnx_layers import FEATURES, HIDDEN, RECIPE, RECIPES, WEIGHTS, X, assert_same, loss, pure, with_params_of

import jax_fp8 as fp8
import jax_fp8.nnx
from jax_fp8.core.lora import LORA_B
from jax_fp8.core.paths import map_with_names
from jax_fp8.nnx.state import FrozenWeight

pytestmark = pytest.mark.versions

LORA = fp8.Lora(rank=4, alpha=6)
PAIRS = {
    "linear": (fp8.Dense, {}, fp8.nnx.Linear, FEATURES),
    "norm": (fp8.LayerNormDense, {}, fp8.nnx.LayerNormLinear, FEATURES),
    "mlp": (fp8.LayerNormMLP, {"residual": True}, fp8.nnx.LayerNormMLP, HIDDEN),
    "gated mlp": (fp8.LayerNormMLP, {"activation": "swiglu"}, fp8.nnx.LayerNormMLP, HIDDEN),
}


class Flax(nnx.Module):
    """Linear layers and attention of Flax."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(FEATURES, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, FEATURES, decode=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x[None])[0]
        return self.down(nnx.gelu(self.up(x)))


def drawn(variables):
    """With second matrices that are not zeros."""

    def draw(names, param):
        return 0.3 * jax.random.normal(jax.random.key(len(names)), param.shape) if names[-1] == LORA_B else param

    return {**variables, "params": map_with_names(draw, variables["params"])}


def weighted(function):
    return lambda model, x: jnp.sum(function(model, x).astype(jnp.float32) * WEIGHTS)


def adapted(recipe=RECIPE, seed=0, **options):
    model = Flax(nnx.Rngs(seed))
    fp8.nnx.convert(model, recipe, lora=fp8.Lora(rank=4, **options), rngs=nnx.Rngs(7))
    return model


def bits(model):
    """Frozen weights, and the kernels that are params, on the host."""
    frozen = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, FrozenWeight))]
    return frozen, [
        np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))))
    ]


@pytest.mark.parametrize("recipe", [*RECIPES.values(), None], ids=[*RECIPES, "bfloat16"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_a_layer_with_an_adapter_is_the_linen_one(pair, recipe):
    linen_cls, options, nnx_cls, features = pair
    linen = linen_cls(features, recipe=recipe, lora=LORA, **options)
    variables = drawn(linen.init(jax.random.key(0), X))
    model = nnx_cls(FEATURES, features, recipe=recipe, lora=LORA, rngs=nnx.Rngs(3), **options)
    model = with_params_of(model, variables)
    of_linen = jax.jit(fp8.value_and_grad(weighted(linen.apply)))
    of_nnx = nnx.jit(fp8.nnx.value_and_grad(weighted(lambda model, x: model(x))))
    expected, expected_grads, _ = of_linen(variables, X)
    found, grads = of_nnx(model, X)
    assert found == expected
    assert_same(pure(grads), expected_grads)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(pure(nnx.state(grads, nnx.LoRAParam))))
    if recipe is None:
        return
    frozen = fp8.freeze_kernels(variables, recipe, forward=lambda variables: linen.apply(variables, X))
    assert fp8.nnx.freeze_kernels(model) == ("",)
    assert not any(path[-1] == "kernel" for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)))
    expected, expected_grads, _ = of_linen(frozen, X)
    found, grads = of_nnx(model, X)
    assert found == expected
    assert_same(pure(grads), expected_grads)
    assert_same(jax.tree.leaves(nnx.state(model, FrozenWeight)), jax.tree.leaves(frozen["fp8_frozen"]))


def test_a_new_adapter_changes_nothing():
    plain = Flax(nnx.Rngs(0))
    fp8.nnx.convert(plain, RECIPE)
    np.testing.assert_array_equal(adapted()(X), plain(X))
    changed = adapted()
    changed.up.lora_b[...] = jnp.ones((4, HIDDEN))
    assert np.any(np.asarray(changed(X)) != np.asarray(plain(X)))


def test_targets_are_names_of_layers():
    model = adapted(targets=("query", "down"))
    found = {path[:-1] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
    assert found == {("attention", "query"), ("down",)}
    assert model.attention.query.lora_a.shape == (FEATURES, 4) and model.attention.query.lora_b.shape == (4, FEATURES)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_training_leaves_frozen_bits_and_learns(recipe):
    model = adapted(recipe)
    assert set(fp8.nnx.freeze_kernels(model)) == {
        "up", "down", *(f"attention/{name}" for name in ("query", "key", "value", "out"))
    }  # fmt: skip
    fp8.nnx.warm_start(loss)(model, X)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    before, adapters = bits(model), jax.tree.map(np.asarray, nnx.state(model, nnx.LoRAParam))

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = fp8.nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, x)
        optimizer.update(model, grads)
        fp8.nnx.update_state(model)
        return value

    losses = [float(step(model, optimizer, X)) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0], losses
    assert_same(bits(model), before)
    moved = jax.tree.map(lambda old, new: np.any(old != np.asarray(new)), adapters, nnx.state(model, nnx.LoRAParam))
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_in_a_compiled_step(microbatches):
    model = adapted()
    fp8.nnx.freeze_kernels(model)
    before = bits(model)
    variables, merge = fp8.nnx.split(model)
    assert sorted(variables) == ["fp8", "fp8_frozen", "params"] and "kernel" not in variables["params"]["up"]
    assert_same(merge(variables)(X), model(X))
    tx = fp8.freeze(fp8.fused_adamw(1e-2), trained="lora_")
    state = fp8.TrainState.create(variables=variables, tx=tx)
    step, losses = fp8.make_train_step(lambda v, x: loss(merge(v), x), tx, RECIPE, microbatches), []
    for _ in range(8):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0], losses
    trained = merge(state.variables)
    assert_same(bits(trained), before)
    assert np.any(np.asarray(trained(X)) != np.asarray(model(X)))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_merged_is_base_plus_adapters(is_frozen):
    model = adapted()
    for number, layer in enumerate((model.up, model.down, model.attention.query)):
        layer.lora_b[...] = jax.random.normal(jax.random.key(number), layer.lora_b.shape)
    kernel, a, b = (np.asarray(x[...], np.float64) for x in (model.up.kernel, model.up.lora_a, model.up.lora_b))
    expected = kernel + a @ b  # alpha is the rank
    if is_frozen:
        fp8.nnx.freeze_kernels(model)
    outputs = np.asarray(model(X), np.float32)
    fp8.nnx.merge_adapters(model)
    assert not nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)) and not nnx.to_flat_state(
        nnx.state(model, FrozenWeight)
    )
    assert model.attention.query.kernel.shape == (FEATURES, 2, FEATURES // 2)
    error = np.abs(model.up.kernel[...] - expected).max() / np.abs(expected).max()
    assert (0.001 < error < 0.03) if is_frozen else error < 1e-6
    assert np.linalg.norm(np.asarray(model(X)) - outputs) < 0.1 * np.linalg.norm(outputs)


def test_merging_changes_the_param_in_place():
    layer = fp8.nnx.Linear(FEATURES, HIDDEN, lora=LORA, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.lora_b[...] = jnp.ones((4, HIDDEN), jnp.bfloat16)
    kernel = layer.kernel
    before = np.asarray(kernel[...], np.float32)
    fp8.nnx.merge_adapters(layer)
    assert layer.kernel is kernel and kernel[...].dtype == jnp.bfloat16 and np.any(kernel[...] != before)


def test_some_layers_alone():
    model = adapted()
    frozen = fp8.nnx.freeze_kernels(model, nnx.PathContains("attention"))
    assert sorted(frozen) == [f"attention/{name}" for name in ("key", "out", "query", "value")]
    assert model.up.kernel is not None and model.attention.out.kernel is None
    assert len(fp8.nnx.freeze_kernels(model)) == 6  # those that are frozen already stay so
    with pytest.raises(ValueError, match=r"must find layers of jax_fp8\.nnx with a recipe, got Flax without one"):
        fp8.nnx.freeze_kernels(Flax(nnx.Rngs(0)))


def test_what_is_refused():
    for name in ("freeze_kernels", "merge_adapters"):
        with pytest.raises(ValueError, match=f"{name} needs an NNX module, got"):
            getattr(fp8.nnx, name)({"model": 3})
    with pytest.raises(ValueError, match=r"Linear\(32, 64\): a layer does not know its name .* got \('up',\)"):
        fp8.nnx.Linear(FEATURES, HIDDEN, lora=fp8.Lora(rank=4, targets=("up",)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="lora must be a Lora or None, got a int"):
        fp8.nnx.LayerNormMLP(FEATURES, HIDDEN, lora=16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="convert needs rngs with lora"):
        fp8.nnx.convert(Flax(nnx.Rngs(0)), lora=LORA)
    model = Flax(nnx.Rngs(0))
    with pytest.raises(ValueError, match="targets of lora must be names of layers that convert swaps, got gate; they"):
        adapters = fp8.Lora(rank=4, targets=("gate", "up"))
        fp8.nnx.convert(model, lora=adapters, rngs=nnx.Rngs(0))
    assert type(model.up) is nnx.Linear  # nothing is swapped

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(keys):
        return fp8.nnx.Linear(FEATURES, FEATURES, lora=LORA, recipe=RECIPE, rngs=nnx.Rngs(keys))

    stacked = make(jax.random.split(jax.random.key(0), 3))
    for refuse in (fp8.nnx.freeze_kernels, fp8.nnx.merge_adapters):
        with pytest.raises(
            ValueError, match=r"kernels of stacked layers are neither frozen nor merged, got one of shape"
        ):
            refuse(stacked)


def test_variables_without_a_kernel_are_refused():
    model = adapted()
    variables, merge = fp8.nnx.split(model)
    with pytest.raises(
        ValueError, match=r'got none at "params"/down/kernel; pass .* freeze kernels of the model before'
    ):
        merge(fp8.freeze_kernels(variables, RECIPE))


def test_adapters_of_stacked_layers():
    """Made by `nnx.vmap`: each has its own adapter, which `nnx.scan` uses."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(keys):
        return fp8.nnx.Linear(FEATURES, FEATURES, lora=LORA, recipe=RECIPE, rngs=nnx.Rngs(keys))

    stacked = make(jax.random.split(jax.random.key(0), 3))
    stacked.lora_b[...] = jax.random.normal(jax.random.key(1), stacked.lora_b.shape)
    assert stacked.lora_a.shape == (3, FEATURES, 4)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return layer(x)

    call = nnx.jit(lambda layer, x: layer(x))
    found, expected, without = run(X, stacked), X, X
    for number in range(3):
        layer = fp8.nnx.Linear(FEATURES, FEATURES, lora=LORA, recipe=RECIPE, rngs=nnx.Rngs(0))
        nnx.update(layer, jax.tree.map(lambda leaf, n=number: leaf[n], nnx.state(stacked)))
        expected = call(layer, expected)
        layer.lora_b[...] = jnp.zeros_like(layer.lora_b[...])
        without = call(layer, without)
    found, expected, without = (np.asarray(y, np.float32) for y in (found, expected, without))
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)  # it rounds in another order
    assert np.linalg.norm(found - without) > 0.5 * np.linalg.norm(expected)
