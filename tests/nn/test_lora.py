"""Adapters: `y = x · kernel + (alpha / rank) · (x · a) · b`, forward and backward, in every layer with a linear map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.core.lora import LORA_A, LORA_B
from jax_fp8.core.paths import map_with_names

LORA = fp8.Lora(rank=4, alpha=6)
WIDTH, HIDDEN, TOKENS = 32, 48, 32
RECIPES = {"bf16": None, "delayed": fp8.DelayedScaling(), "current": fp8.CurrentScaling(), "block": fp8.BlockScaling()}
LAYERS = {
    "dense": lambda **own: fp8.Dense(HIDDEN, **own),
    "norm_dense": lambda **own: fp8.LayerNormDense(HIDDEN, **own),
    "mlp": lambda **own: fp8.LayerNormMLP(HIDDEN, residual=True, **own),
    "gated_mlp": lambda **own: fp8.LayerNormMLP(HIDDEN, "swiglu", "rmsnorm", residual=True, **own),
    "attention": lambda **own: fp8.SelfAttention(2, norm="rmsnorm", residual=True, use_bias=False, **own),
    "cross_attention": lambda **own: fp8.CrossAttention(2, use_bias=False, **own),
}


def inputs_of(name):
    x = jax.random.normal(jax.random.key(0), (2, TOKENS // 2, WIDTH))
    return (x, jax.random.normal(jax.random.key(5), x.shape)) if name == "cross_attention" else (x,)


def trained(variables):
    """With adapters that change something: `b` begins as zeros."""

    def draw(names, param):
        return 0.3 * jax.random.normal(jax.random.key(len(names[0])), param.shape) if names[-1] == LORA_B else param

    return {**variables, "params": map_with_names(draw, variables["params"])}


def merged(params):
    """The params of the plain layer, with each adapter added to its kernel."""
    if LORA_A in params:
        kernel = params["kernel"] + LORA.scaling * params[LORA_A] @ params[LORA_B]
        params = {**params, "kernel": kernel}
    return {
        name: merged(child) if isinstance(child, dict) else child
        for name, child in params.items()
        if name not in (LORA_A, LORA_B)
    }


def made(name, recipe=None, **own):
    layer, inputs = LAYERS[name](recipe=recipe, lora=LORA, **own), inputs_of(name)
    return layer, trained(jax.jit(layer.init)(jax.random.key(1), *inputs)), inputs


def in_float32(function):
    def run(*args):
        with jax.default_matmul_precision("highest"):
            return function(*args)

    return jax.jit(run)


@pytest.mark.parametrize("name", LAYERS)
def test_an_adapter_is_a_term_of_the_kernel(name):
    """In float32, outputs and all gradients are those of the plain layer with merged kernels."""
    layer, variables, inputs = made(name, dtype=jnp.float32)
    plain = layer.clone(lora=None)
    weights = jax.random.normal(jax.random.key(3), in_float32(layer.apply)(variables, *inputs).shape)

    def loss(params, *inputs):
        return jnp.sum(weights * layer.apply({"params": params}, *inputs))

    def expected(params, *inputs):
        return jnp.sum(weights * plain.apply({"params": merged(params)}, *inputs))

    found = in_float32(jax.value_and_grad(loss, (0, 1)))(variables["params"], *inputs)
    wanted = in_float32(jax.value_and_grad(expected, (0, 1)))(variables["params"], *inputs)
    without = in_float32(lambda params, *inputs: plain.apply({"params": params}, *inputs))
    base = map_with_names(lambda names, p: 0 * p if names[-1] == LORA_B else p, variables["params"])
    assert not np.allclose(without(merged(base), *inputs), without(merged(variables["params"]), *inputs), atol=1e-2)
    for (path, one), (_, other) in zip(*map(jax.tree_util.tree_leaves_with_path, (found, wanted)), strict=True):
        assert np.abs(other).max() > 1e-3, path
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max(), rtol=1e-4, err_msg=str(path))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_new_adapter_changes_little_but_rounding(name, recipe):
    """Its second matrix is zeros. With adapters the norm is not fused, so bfloat16 rounds once more on the way."""
    layer, inputs = LAYERS[name](recipe=RECIPES[recipe], lora=LORA), inputs_of(name)
    variables = jax.jit(layer.init)(jax.random.key(1), *inputs)
    plain = {**variables, "params": merged(variables["params"])}
    found = jax.jit(layer.apply)(variables, *inputs).astype(jnp.float32)
    wanted = jax.jit(layer.clone(lora=None).apply)(plain, *inputs).astype(jnp.float32)
    assert np.linalg.norm(found - wanted) <= 0.02 * np.linalg.norm(wanted)
    if name == "dense":
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
@pytest.mark.parametrize("name", ["gated_mlp", "attention"])
def test_gradients_of_adapters_in_fp8(name, recipe):
    """FP8 rounds what adapters see: their gradients differ from those in float32 by the error of FP8, not more."""
    layer, variables, inputs = made(name, RECIPES[recipe])
    weights = jax.random.normal(jax.random.key(3), inputs[0].shape)

    def loss(variables, layer):
        return jnp.sum(weights * layer.apply(variables, *inputs).astype(jnp.float32))

    _, found, _ = jax.jit(fp8.value_and_grad(lambda variables: loss(variables, layer)))(variables)
    exact = layer.clone(recipe=None, dtype=jnp.float32)
    wanted = in_float32(jax.grad(lambda params: loss({"params": params}, exact)))(variables["params"])
    for (path, one), (_, other) in zip(*map(jax.tree_util.tree_leaves_with_path, (found, wanted)), strict=True):
        if path[-1].key not in (LORA_A, LORA_B):
            continue
        error = np.linalg.norm(np.asarray(one, np.float32) - other) / np.linalg.norm(other)
        assert np.linalg.norm(other) > 0 and error < 0.15, (path, error)


def test_targets_name_the_layers():
    lora = fp8.Lora(rank=2, targets=("query", "down"))
    block = fp8.TransformerBlock(2, HIDDEN, lora=lora)
    params = jax.eval_shape(block.init, jax.random.key(0), inputs_of("dense")[0])["params"]
    found = {names[:-1] for names, _ in _named(params) if names[-1] == LORA_A}
    assert found == {("attention", "query"), ("mlp", "down")}
    assert jax.eval_shape(block.apply, block.init(jax.random.key(0), inputs_of("dense")[0]), inputs_of("dense")[0])


def test_adapters_of_some_kernels_side_by_side():
    """One product of three kernels, of which the middle one has no adapter."""
    x = inputs_of("attention")[0]
    layer = fp8.SelfAttention(
        2, recipe=None, dtype=jnp.float32, use_bias=False, lora=fp8.Lora(rank=4, alpha=6, targets=("query", "value"))
    )
    variables = trained(layer.init(jax.random.key(1), x))
    plain = layer.clone(lora=None)
    found = in_float32(layer.apply)(variables, x)
    np.testing.assert_allclose(found, in_float32(plain.apply)({"params": merged(variables["params"])}, x), atol=1e-5)
    for recipe in (fp8.DelayedScaling(), fp8.BlockScaling()):
        in_fp8 = layer.clone(recipe=recipe, dtype=jnp.bfloat16, use_bias=False)
        state = {**in_fp8.init(jax.random.key(1), x), "params": variables["params"]}
        gradient = fp8.value_and_grad(lambda v, own=in_fp8: jnp.sum(own.apply(v, x).astype(jnp.float32) ** 2))
        grads = jax.jit(gradient)(state)[1]
        largest = jax.tree.map(lambda leaf: float(np.abs(np.asarray(leaf)).max()), grads)
        assert all(size > 0 for size in jax.tree.leaves(largest)), largest


def test_experts_have_no_adapters():
    x = inputs_of("dense")[0]
    with pytest.raises(ValueError, match="experts have no adapters"):
        fp8.LayerNormMoE(HIDDEN, 2, lora=LORA).init(jax.random.key(0), x)
    own = fp8.Lora(rank=2, targets=("query",))
    fp8.LayerNormMoE(HIDDEN, 2, lora=own).init(jax.random.key(0), x)


def _named(tree):
    return [(tuple(key.key for key in path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
