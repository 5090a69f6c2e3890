"""A GPT with DeepSeek's layers: dense ones first, a shared expert, and routers with sigmoids, groups and a bias."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import make_mesh
from moe.test_moe import RECIPES, TOKENS, assert_writes_what_it_would_read, gpt, largest_error, train
from reference import assert_same_bits, relative_error

import jax_fp8 as fp8

DEEPSEEK = {
    "layers": 3,
    "dense_layers": (0,),
    "dense_hidden_size": 256,
    "shared_expert_features": 128,
    "num_experts": 8,
    "experts_per_token": 3,
    "router_scores": "sigmoid",
    "router_scale": 1.5,
    "router_correction_bias": True,
    "expert_groups": 4,
    "groups_per_token": 2,
    "router_aux_loss": 0.0,
}
BIAS = {"layer_1", "layer_2"}


def deepseek(name, **config):
    return gpt(RECIPES[name], **DEEPSEEK | {"max_seq_len": 32} | config)


RATE = 0.01


@functools.cache
def start(name):
    """With biases for which the experts are used unevenly."""
    variables = jax.device_get(jax.jit(deepseek(name).init)(jax.random.key(1), TOKENS[:, :-1]))
    for number, layer in enumerate(sorted(BIAS)):
        uneven = 0.05 * np.random.default_rng(number).normal(size=8).astype(np.float32)
        variables["params"][layer]["mlp"]["router"]["correction_bias"] = uneven
    return variables


def biases(params):
    return {name: np.asarray(params[name]["mlp"]["router"]["correction_bias"]) for name in BIAS}


@functools.cache
def fractions_of(name):
    model = deepseek(name)
    seen = jax.jit(lambda variables: model.apply(variables, TOKENS[:, :-1], mutable=["intermediates"])[1])
    return lambda variables: {
        name: np.asarray(seen(variables)["intermediates"][name]["mlp"]["expert_fractions"][0]) for name in BIAS
    }


@functools.cache
def learned(name):
    """The model, the state after thirty steps, and the losses."""
    tx = fp8.balance_experts(fp8.fused_adamw(2e-3), RATE)
    return deepseek(name), *train(deepseek(name), 30, tx, variables=start(name))


def test_variables():
    params, scales = start("delayed")["params"], start("delayed")["fp8"]
    assert params["layer_0"]["mlp"]["up"]["kernel"].shape == (128, 256) and "router" not in params["layer_0"]["mlp"]
    assert params["layer_1"]["mlp"]["up"]["kernel"].shape == (8, 128, 128)
    assert params["layer_2"]["mlp"]["shared"]["down"]["kernel"].shape == (128, 128)
    assert set(scales["layer_0"]["mlp"]) == {"gate+up", "down"}
    assert set(scales["layer_1"]["mlp"]) == {"+gate+up", "+down", "shared"}


@pytest.mark.parametrize("name", RECIPES)
def test_thirty_steps_learn_and_balance(name):
    _, state, losses = learned(name)
    assert losses[-1] < 0.35 * losses[0], losses[::10]
    for layer, bias in biases(state.params).items():
        steps = (bias - biases(start(name)["params"])[layer]) / RATE
        assert np.abs(steps).max() > 3 and np.allclose(steps, np.round(steps), atol=1e-3)
    if name == "delayed":
        history = state.fp8["layer_1"]["mlp"]["shared"]["down"]["amax_history"]
        assert (history[..., 1:] > 0).all()


def test_without_a_rate_experts_are_used_less_evenly():
    tx = fp8.balance_experts(fp8.fused_adamw(2e-3), 0.0)
    still, _ = train(deepseek("none"), 30, tx, variables=start("none"))
    _, balanced, _ = learned("none")
    spread = [sum(map(np.std, fractions_of("none")(state.variables).values())) for state in (still, balanced)]
    assert spread[1] < 0.6 * spread[0], spread


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"data": 4}, {"fsdp": 4}], ids=str)
@pytest.mark.parametrize("name", ["none", pytest.param("delayed", marks=pytest.mark.slow)])
def test_three_steps_are_those_of_one_device(name, options):
    tx = fp8.balance_experts(optax.sgd(0.1), 0.25)
    wanted, losses = train(deepseek(name), 3, tx, variables=start(name))
    options = options if "microbatches" in options else {"parallel": make_mesh(**options)}
    found, losses_found = train(deepseek(name), 3, tx, variables=start(name), **options)
    assert np.max(np.abs(np.subtract(losses, losses_found))) < 0.01, (losses, losses_found)
    # A token near a tie may go elsewhere, and an expert whose load is near the mean may be on its other side.
    for layer, bias in biases(found.params).items():
        assert np.mean(bias == biases(wanted.params)[layer]) >= 0.75, layer
        assert np.all(bias != start(name)["params"][layer]["mlp"]["router"]["correction_bias"])
    moved, exact = (jax.tree.map(np.subtract, of.params, start(name)["params"]) for of in (found, wanted))
    for layer in BIAS:
        del moved[layer]["mlp"]["router"]["correction_bias"], exact[layer]["mlp"]["router"]["correction_bias"]
    bound = 0.15 if name == "none" else 0.45  # small gradients of queries and keys, in FP8
    assert largest_error(moved, exact) < bound, jax.tree.map(relative_error, moved, exact)


def test_with_a_weight_cache_it_is_the_same_step():
    model, variables = deepseek("delayed"), start("delayed")
    cache = jax.jit(functools.partial(fp8.cast_weights, recipe=model.recipe))(variables)
    assert "shared" in cache["layer_1"]["mlp"]
    tx = fp8.balance_experts(fp8.fused_adamw(1e-3), 0.25)
    cached, _ = train(model, 2, tx, variables={**variables, "fp8_cache": cache}, microbatches=2)
    plain, _ = train(model, 2, tx, variables=variables, microbatches=2)
    jax.tree.map(assert_same_bits, cached.params, plain.params)
    jax.tree.map(assert_same_bits, cached.fp8, plain.fp8)


@pytest.mark.parametrize("name", ["delayed", "none"])
def test_it_writes_what_it_would_read(name):
    model, state, _ = learned(name)
    assert_writes_what_it_would_read(model, state, least=0.7 if name == "delayed" else 0.9)


def test_a_shared_expert_and_dense_layers_are_in_fp8():
    model = deepseek("delayed")
    variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((8, 16), jnp.int32))
    gemms = fp8.explain(fp8.next_token_loss(model), variables, jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32))
    layers = {gemm.layer for gemm in gemms if gemm.is_fp8}
    assert {f"GPT/layer_{path}/fprop" for path in ("0/mlp/gate+up", "1/mlp/down", "2/mlp/shared/down")} <= layers
    assert all(gemm.is_fp8 or gemm.by_design for gemm in gemms), gemms


def params_of(preset):
    model = fp8.GPT(fp8.GPTConfig.preset(preset), recipe=None)
    return jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))["params"]


# In billions, and of a token. Qwen3: https://arxiv.org/abs/2505.09388, table 2; DeepSeek-V2-Lite:
# https://arxiv.org/abs/2405.04434, appendix B, whose attention has fewer params than this one.
@pytest.mark.parametrize(
    ("preset", "total", "used"),
    [("qwen3-30b-a3b", 30.5, 3.3), ("qwen3-235b-a22b", 235.1, 22.2), ("deepseek-v2-lite", 15.8, 2.7)],
)
def test_presets_have_as_many_parameters_as_their_papers_say(preset, total, used):
    config = fp8.GPTConfig.preset(preset)
    sizes = {
        "/".join(key.key for key in path): leaf.size for path, leaf in jax.tree.leaves_with_path(params_of(preset))
    }
    experts = sum(
        size for path, size in sizes.items() if "/mlp/" in path and path.split("/")[-2] in ("gate", "up", "down")
        and "shared" not in path and int(path.split("/")[0][6:]) not in config.dense_layers
    )  # fmt: skip
    of_a_token = sum(sizes.values()) - experts * (1 - config.experts_per_token / config.num_experts)
    assert round(sum(sizes.values()) / 1e9, 1) == total and abs(of_a_token / 1e9 - used) < 0.1


@pytest.mark.parametrize(
    ("sentence", "fields"),
    [
        ("shared_expert_features is for a model with experts, got num_experts=0", {"shared_expert_features": 16}),
        ("dense_layers is for a model with experts, got num_experts=0", {"dense_layers": (0,)}),
        ("dense_layers: each number must be an integer from 0 to 3, got 4", {"num_experts": 4, "dense_layers": (4,)}),
        ("dense_hidden_size is for dense_layers, got none", {"num_experts": 4, "dense_hidden_size": 64}),
        ("dense_hidden_size must be an integer of at least 1, got 0", {"dense_hidden_size": 0}),
        ('router_scores must be "softmax" or "sigmoid"', {"num_experts": 4, "router_scores": "tanh"}),
        ("expert_groups must divide num_experts", {"num_experts": 4, "expert_groups": 3}),
        ("gate_shared_expert is for a shared expert", {"num_experts": 4, "gate_shared_expert": True}),
        ("router_correction_bias must be True or False", {"num_experts": 4, "router_correction_bias": 1.0}),
    ],
)
def test_refusals(sentence, fields):
    with pytest.raises(ValueError, match=sentence):
        fp8.GPTConfig.preset("tiny-llama", **fields)
