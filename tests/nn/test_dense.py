"""Dense and LayerNormDense: their variables, their numbers against float64, and their drop-in behaviour."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jax_fp8 as fp8

pytestmark = pytest.mark.versions

RECIPES = {"delayed": fp8.DelayedScaling(amax_history_len=4), "current": fp8.CurrentScaling(), "bf16": None}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def data(shape=(2, 16, 64), seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@recipes
def test_variables(recipe):
    variables = fp8.Dense(32, recipe=recipe).init(jax.random.key(0), data())
    shapes = jax.tree.map(jnp.shape, dict(variables))
    assert shapes["params"] == {"kernel": (64, 32), "bias": (32,)}
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(variables))
    state = {"fp8": {"scale": (3,), "amax_history": (3, 4)}} if isinstance(recipe, fp8.DelayedScaling) else {}
    assert {name: shapes[name] for name in shapes if name != "params"} == state


@recipes
def test_dense_is_flax_dense_within_fp8(recipe):
    x, module = data(), fp8.Dense(32, recipe=recipe, bias_init=nn.initializers.normal(1.0))
    variables = module.init(jax.random.key(1), x)
    y = module.apply(variables, x)
    expected = nn.Dense(32).apply({"params": variables["params"]}, x.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16
    assert y.shape == (2, 16, 32)
    reference.assert_close(y, expected, "linear" if recipe else "bfloat16")


@pytest.mark.filterwarnings("ignore:delayed scaling is differentiated without")
@recipes
def test_gradients_of_every_input(recipe):
    x, module = data(), fp8.Dense(32, recipe=recipe)
    variables = module.init(jax.random.key(1), x)
    dy = data((2, 16, 32), seed=2).astype(jnp.float32)
    scaled = (
        {**variables, "fp8": {**variables["fp8"], "scale": jnp.float32([0.01, variables["fp8"]["scale"][1], 1e-4])}}
        if "fp8" in variables
        else variables
    )

    def loss(params, x):
        return jnp.sum(module.apply({**scaled, "params": params}, x).astype(jnp.float32) * dy)

    grads, dx = jax.jit(jax.grad(loss, argnums=(0, 1)))(variables["params"], x)
    flat = [np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (x, dy)]
    kind = "linear_gradient" if recipe else "bfloat16"
    reference.assert_close(grads["kernel"], flat[0].T @ flat[1], kind)
    reference.assert_close(grads["bias"], flat[1].sum(axis=0), "bfloat16")
    reference.assert_close(
        np.asarray(dx, np.float64).reshape(-1, 64),
        flat[1] @ np.asarray(variables["params"]["kernel"], np.float64).T,
        kind,
    )


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@recipes
def test_layer_norm_dense_is_norm_then_dense(recipe, norm):
    x, module = data(), fp8.LayerNormDense(32, norm, recipe=recipe)
    variables = module.init(jax.random.key(1), x)
    assert set(variables["params"]["norm"]) == ({"scale", "bias"} if norm == "layernorm" else {"scale"})
    params = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(jax.random.key(3), p.shape), variables["params"])
    variables = {**variables, "params": params}
    if "fp8" in variables:  # new params: measure again
        _, staged = module.apply(variables, x, mutable=["fp8"])
        variables["fp8"] = fp8.update_state(staged["fp8"], recipe)
    y = module.apply(variables, x)
    flax_norm = nn.LayerNorm() if norm == "layernorm" else nn.RMSNorm()
    normalized = flax_norm.apply({"params": params["norm"]}, x.astype(jnp.float32))
    dense = {name: params[name] for name in ("kernel", "bias")}
    reference.assert_close(y, nn.Dense(32).apply({"params": dense}, normalized), "linear" if recipe else "bfloat16")


@pytest.mark.filterwarnings("ignore:delayed scaling is differentiated without")
@recipes
def test_vmap_is_a_loop(recipe):
    x, module = data((3, 16, 64)), fp8.Dense(32, recipe=recipe)
    variables = module.init(jax.random.key(1), x[0])

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jnp.square(module.apply(variables, x).astype(jnp.float32))))(x)

    np.testing.assert_array_equal(jax.vmap(gradient)(x), jnp.stack([gradient(row) for row in x]))
    assert np.any(gradient(x[0]) != gradient(x[1]))


def test_param_and_compute_dtypes():
    module = fp8.Dense(32, dtype=jnp.float32, param_dtype=jnp.bfloat16, use_bias=False)
    y, variables = module.init_with_output(jax.random.key(0), data())
    assert y.dtype == jnp.float32
    assert jax.tree.map(lambda leaf: leaf.dtype, variables["params"]) == {"kernel": jnp.bfloat16}


def test_misuse():
    with pytest.raises(ValueError, match="recipe must be"):
        fp8.Dense(32, recipe="delayed").init(jax.random.key(0), data())
    with pytest.raises(ValueError, match="norm must be one of"):
        fp8.LayerNormDense(32, "batchnorm").init(jax.random.key(0), data())
