"""Mixtures with a shared expert, and with routers of every kind, against a dense float32 computation."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts import RECIPES, chosen_experts
from nn.test_moe import EXPERTS, FEATURES, SIGNS, X, gradients, moe, variables_of
from reference import TOLERANCE, assert_close, assert_same_bits, relative_error

import jax_fp8 as fp8

SHARED = 128  # hidden features of the shared expert
LAYERS = {
    "shared": {"shared_expert_features": SHARED},
    "shared, weighted": {"shared_expert_features": SHARED, "gate_shared_expert": True},
    "sigmoid": {"router_scores": "sigmoid", "router_scale": 2.5},
    "deepseek": {
        "shared_expert_features": SHARED,
        "router_scores": "sigmoid",
        "router_scale": 1.5,
        "router_correction_bias": True,
        "expert_groups": 2,
        "groups_per_token": 1,
    },
}
# As in test_moe.py, but that what is added to the exact residual is larger.
TOLERANCES = {"delayed": (0.058, 0.095), "current": (0.058, 0.095), "block": (0.058, 0.08)}
pytestmark = pytest.mark.filterwarnings("ignore:delayed scaling is differentiated without")


def layer_of(name, recipe=None, **fields):
    return moe(recipe, **LAYERS[name] | fields)


@cache
def start(layer):
    variables = variables_of(layer)
    router = variables["params"]["router"]
    if "correction_bias" in router:
        router["correction_bias"] = np.array([0.3, -0.2, 0.1, -0.1], np.float32)
    return variables


def normalize(tokens, scale):
    return tokens * jax.lax.rsqrt(jnp.mean(tokens**2, -1, keepdims=True) + 1e-6) * scale


def chosen_of(layer, params):
    """bool (tokens, experts), by NumPy in float64."""
    logits = np.asarray(normalize(X.reshape(-1, FEATURES), params["norm"]["scale"]), np.float64)
    logits = logits @ np.asarray(params["router"]["kernel"], np.float64)
    bias = np.asarray(params["router"].get("correction_bias", 0.0), np.float64)
    rule = layer.router_scores, bias, layer.expert_groups, layer.groups_per_token
    return np.any(chosen_experts(logits, 2, *rule)[:, :, None] == np.arange(EXPERTS), axis=1)


@partial(jax.jit, static_argnums=0)
def dense(layer, params, x, chosen):
    """The layer in float32: all experts on all tokens, times the router's weights or 0."""
    tokens = x.reshape(-1, FEATURES)
    normalized = normalize(tokens, params["norm"]["scale"])

    def mlp(kernels):
        gate, up, down = (kernels[name]["kernel"] for name in ("gate", "up", "down"))
        return (jax.nn.silu(normalized @ gate) * (normalized @ up)) @ down

    with jax.default_matmul_precision("highest"):
        logits = normalized @ params["router"]["kernel"]
        weights = jnp.exp(logits) / (1 + jnp.exp(logits)) if layer.router_scores == "sigmoid" else jnp.exp(logits)
        weights = weights * chosen
        weights = layer.router_scale * weights / jnp.sum(weights, -1, keepdims=True)
        y = tokens + jnp.einsum("te,etk->tk", weights, mlp(params))
        if "shared" in params:
            shared = params["shared"]
            weight = jax.nn.sigmoid(normalized @ shared["router"]["kernel"]) if "router" in shared else 1
            y += weight * mlp(shared)
    return y.reshape(x.shape)


def exact(layer, params):
    chosen = chosen_of(layer, params)
    return lambda params, x: dense(layer, params, x, chosen)


@pytest.mark.parametrize("name", LAYERS)
def test_in_float32_without_fp8(name):
    layer = layer_of(name)
    params = start(layer)["params"]
    wanted = exact(layer, params)
    assert_close(jax.jit(layer.apply)({"params": params}, X), wanted(params, X), "float32")
    found = gradients(lambda params, x: layer.apply({"params": params}, x), params)
    other = gradients(wanted, params)
    assert found.keys() == other.keys()
    found.pop("router/correction_bias", None)  # the load of the experts
    for path, gradient in found.items():
        assert relative_error(gradient, other[path]) < TOLERANCE["float32"], path


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_in_fp8(name, recipe):
    layer = layer_of(name, RECIPES[recipe])
    variables = start(layer)
    params = variables["params"]
    if recipe == "delayed":
        warm = fp8.warm_start(lambda variables, x: jnp.sum(layer.apply(variables, x) * SIGNS), RECIPES[recipe])
        variables = {**variables, "fp8": jax.jit(warm)(variables, X)}
        assert ("shared" in variables["fp8"]) == ("shared" in params)
    wanted = exact(layer, params)
    forward, backward = TOLERANCES[recipe]
    error = relative_error(jax.jit(layer.apply)(variables, X), wanted(params, X))
    assert 1e-3 < error < forward, error
    found = gradients(lambda params, x: layer.apply({**variables, "params": params}, x), params)
    other = gradients(wanted, params)
    found.pop("router/correction_bias", None)  # the load of the experts
    errors = {path: relative_error(gradient, other[path]) for path, gradient in found.items()}
    assert max(errors.values()) < backward, errors
    if "shared" in params:
        assert errors["shared/up/kernel"] > 0.01  # or it was not in FP8
        without = {**params, "shared": jax.tree.map(np.zeros_like, params["shared"])}
        assert (
            relative_error(jax.jit(layer.apply)({**variables, "params": without}, X), wanted(params, X)) > 3 * forward
        )


def test_variables():
    variables = jax.eval_shape(layer_of("deepseek", RECIPES["delayed"]).init, jax.random.key(0), X)
    shapes = jax.tree.map(jnp.shape, variables["params"])
    assert shapes["router"] == {"kernel": (FEATURES, EXPERTS), "correction_bias": (EXPERTS,)}
    assert shapes["shared"] == {
        "gate": {"kernel": (FEATURES, SHARED)},
        "up": {"kernel": (FEATURES, SHARED)},
        "down": {"kernel": (SHARED, FEATURES)},
    }
    assert set(variables["fp8"]) == {"+gate+up", "+down", "shared"}
    assert set(variables["fp8"]["shared"]) == {"gate+up", "down"}
    weighted = jax.eval_shape(layer_of("shared, weighted", None).init, jax.random.key(0), X)["params"]["shared"]
    assert weighted["router"]["kernel"].shape == (FEATURES, 1) and "bias" not in weighted["up"]


def test_a_plain_activation_without_a_residual_and_with_dropout():
    layer = layer_of("shared", activation="gelu", residual=False, dropout_rate=0.5, deterministic=True)
    params = start(layer)["params"]
    assert set(params["shared"]) == {"up", "down"}
    apply = jax.jit(layer.apply)
    y = apply({"params": params}, X)
    with_residual = layer.clone(residual=True)
    assert_close(jax.jit(with_residual.apply)({"params": params}, X), X + y, "float32")
    drops = jax.jit(layer.clone(deterministic=False).apply)
    dropped = np.asarray(drops({"params": params}, X, rngs={"dropout": jax.random.key(0)}))
    kept = dropped != 0
    assert 0.4 < kept.mean() < 0.6
    assert_close(dropped[kept], 2 * np.asarray(y)[kept], "float32")


def test_a_shared_expert_alone_is_an_mlp():
    """Where the weights of the router are small, what is left is `LayerNormMLP` with the kernels of the shared one."""
    layer = layer_of("shared", RECIPES["current"], normalize_router_weights=False, router_scale=1e-30)
    params = start(layer)["params"]
    mlp = fp8.LayerNormMLP(
        SHARED,
        activation="swiglu",
        norm="rmsnorm",
        use_bias=False,
        residual=True,
        recipe=RECIPES["current"],
        dtype=jnp.float32,
    )
    own = {"norm": params["norm"], **params["shared"]}
    assert_same_bits(jax.jit(layer.apply)({"params": params}, X), jax.jit(mlp.apply)({"params": own}, X))


@pytest.mark.parametrize(
    ("sentence", "fields"),
    [
        ("shared_expert_features must be an integer of at least 0, got -1", {"shared_expert_features": -1}),
        ("gate_shared_expert is for a shared expert", {"gate_shared_expert": True}),
        ("gate_shared_expert must be True or False", {"gate_shared_expert": "yes", "shared_expert_features": 16}),
        ("shared/gate\\+up: FP8 needs .* divisible by 16, got 24", {"shared_expert_features": 24}),
        ("LayerNormMoE: expert_groups must divide num_experts, got 3", {"expert_groups": 3}),
    ],
)
def test_refusals(sentence, fields):
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(moe(RECIPES["current"], **fields).init, jax.random.key(0), X)
