"""NNX layers are the Linen ones: bit for bit, forward, gradients and state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_layers import FEATURES, HIDDEN, RECIPE, RECIPES, WEIGHTS, X, assert_same, pure, with_params_of

import jax_fp8 as fp8
import jax_fp8.nnx

pytestmark = pytest.mark.versions

PAIRS = {
    "linear": (fp8.Dense, {}, fp8.nnx.Linear, FEATURES),
    "linear, no bias": (fp8.Dense, {"use_bias": False}, fp8.nnx.Linear, FEATURES),
    "linear, recompute": (fp8.Dense, {"recompute": True}, fp8.nnx.Linear, FEATURES),
    "norm": (fp8.LayerNormDense, {}, fp8.nnx.LayerNormLinear, FEATURES),
    "rmsnorm": (fp8.LayerNormDense, {"norm": "rmsnorm", "epsilon": 1e-3}, fp8.nnx.LayerNormLinear, FEATURES),
    "mlp": (fp8.LayerNormMLP, {}, fp8.nnx.LayerNormMLP, HIDDEN),
    "gated mlp": (fp8.LayerNormMLP, {"activation": "swiglu", "residual": True}, fp8.nnx.LayerNormMLP, HIDDEN),
}


def loss_of(function):
    return lambda model, x: jnp.sum(function(model, x).astype(jnp.float32) * WEIGHTS)


@pytest.mark.parametrize("recipe", [*RECIPES.values(), None], ids=[*RECIPES, "bfloat16"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_a_layer_is_the_linen_one_bit_for_bit(pair, recipe):
    linen_cls, options, nnx_cls, features = pair
    linen = linen_cls(features, recipe=recipe, bias_init=jax.nn.initializers.normal(1.0), **options)
    variables = linen.init(jax.random.key(0), X)
    model = with_params_of(nnx_cls(FEATURES, features, recipe=recipe, rngs=nnx.Rngs(3), **options), variables)
    assert_same(fp8.nnx.fp8_state(model), variables.get("fp8", {}))
    differentiate = jax.jit(fp8.value_and_grad(loss_of(linen.apply)))
    of_nnx = nnx.jit(fp8.nnx.value_and_grad(loss_of(lambda model, x: model(x))))
    for _ in range(2):  # with the scales that it begins with, and with those of its history
        expected, expected_grads, state = differentiate(variables, X)
        found, grads = of_nnx(model, X)
        assert found == expected
        assert_same(pure(grads), expected_grads)
        assert_same(fp8.nnx.fp8_state(model), state)
        fp8.nnx.update_state(model)
        variables = {**variables, "fp8": fp8.update_state(state, recipe)}
        assert_same(fp8.nnx.fp8_state(model), variables["fp8"])


def test_a_layer_begins_as_the_linen_one_does():
    model = fp8.nnx.Linear(FEATURES, HIDDEN, recipe=RECIPE, rngs=nnx.Rngs(0))
    state = fp8.nnx.fp8_state(model)
    np.testing.assert_array_equal(state["scale"][::2], 1)
    np.testing.assert_allclose(state["scale"][1], jnp.max(jnp.abs(model.kernel[...])) / 448, rtol=1e-6)
    assert isinstance(model.fp8.scale, fp8.nnx.Fp8State) and model.kernel.shape == (FEATURES, HIDDEN)
    theirs = nnx.Linear(FEATURES, HIDDEN, rngs=nnx.Rngs(0))
    assert_same(pure(nnx.state(model, nnx.Param)), pure(nnx.state(theirs, nnx.Param)))  # the same keys, the same kernel


def test_a_residual_and_the_input_are_passed_on():
    layer = fp8.nnx.Linear(FEATURES, FEATURES, recipe=RECIPE, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(layer(X, residual=X).astype(jnp.float32), (layer(X) + X).astype(jnp.float32), atol=0.05)
    norm = fp8.nnx.LayerNormLinear(FEATURES, HIDDEN, return_input=True, recipe=RECIPE, rngs=nnx.Rngs(0))
    y, x = norm(X)
    assert y.shape == (64, HIDDEN)
    np.testing.assert_array_equal(x, X)


def test_dtypes():
    x = X.astype(jnp.float32)
    assert fp8.nnx.Linear(FEATURES, HIDDEN, rngs=nnx.Rngs(0))(x).dtype == jnp.bfloat16
    as_flax = fp8.nnx.Linear(FEATURES, HIDDEN, dtype=None, rngs=nnx.Rngs(0))
    assert as_flax(x).dtype == jnp.float32 and as_flax(X).dtype == jnp.float32
    half = fp8.nnx.Linear(FEATURES, HIDDEN, dtype=None, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert half(X).dtype == jnp.bfloat16 and half.kernel[...].dtype == jnp.bfloat16
