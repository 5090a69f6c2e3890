"""The baseline with experts computes what a `GPT` with experts does, from the same params, if it has room for all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_params import as_plain

import jax_fp8 as fp8


def with_experts(params):
    """Our params under the names of the baseline."""
    plain = as_plain_attention(params)
    for number in range(sum(name.startswith("layer_") for name in params)):
        mlp = params[f"layer_{number}"]["mlp"]
        gate_up = jnp.concatenate([mlp[name]["kernel"] for name in ("gate", "up")], axis=-1)
        own = {"router": mlp["router"], "gate_up": gate_up, "down": mlp["down"]["kernel"]}
        plain[f"block_{number}"] |= {"experts": own}
    return plain


def as_plain_attention(params):
    without = {name: tree for name, tree in params.items()}
    for name, layer in params.items():
        if name.startswith("layer_"):
            one = {linear: {"kernel": layer["mlp"][linear]["kernel"][0]} for linear in ("gate", "up", "down")}
            without[name] = {**layer, "mlp": {**layer["mlp"], **one}}
    plain = as_plain(without)
    for name, block in plain.items():
        if name.startswith("block_"):
            del block["gate_up"], block["down"]
    return plain


@pytest.fixture
def shape(benchmark):
    variants = benchmark("variants")
    return variants.dataclasses.replace(variants.SHAPES["tiny_moe"], num_layers=2, capacity=4.0)


def test_the_plain_model_is_ours(shape):
    model = fp8.GPT(shape.config, recipe=None)
    tokens = jax.random.randint(jax.random.key(0), (2, 64), 0, shape.vocab_size)
    params = model.init(jax.random.key(1), tokens)["params"]
    for layer in ("layer_0", "layer_1"):  # experts that matter beside the residual stream
        params[layer]["mlp"]["down"] = {"kernel": 4 * params[layer]["mlp"]["down"]["kernel"]}
    ours = np.asarray(model.apply({"params": params}, tokens), np.float32)

    def distance(params, **changes):
        of = type(shape)(**{**vars(shape), **changes})
        found = of.plain(None).apply({"params": with_experts(params)}, tokens)
        return float(np.linalg.norm(ours - np.asarray(found, np.float32)) / np.linalg.norm(ours))

    assert distance(params) < 0.03, distance(params)  # of bfloat16
    assert distance(params, capacity=1.0) > 0.05  # some tokens find no room
    mlp = params["layer_1"]["mlp"]
    params["layer_1"]["mlp"] = mlp | {"down": {"kernel": mlp["down"]["kernel"][::-1]}}
    assert distance(params) > 0.1


def test_flops_count_experts_that_a_token_goes_to(benchmark):
    shape = benchmark("variants").SHAPES["tiny_moe"]
    attention, head, norms = 128 * (128 + 2 * 64 + 128), 256 * 128, 3 * 128
    expert, router, square = 3 * 128 * 128, 128 * 4, 6 * 64 * 128 // 2 * 2
    all_params = attention + 4 * expert + router + 2 * head + norms
    assert shape.flops(all_params, 1) == 6 * (attention + 2 * expert + router + head + norms) + square


@pytest.mark.parametrize("variant", ["bf16", "ours_bf16", "delayed", "block"])
def test_every_variant_trains_the_same_model(benchmark, variant):
    gpt_step = benchmark("gpt_step")
    shape = gpt_step.SHAPES["tiny_moe"]
    found = gpt_step.measure(gpt_step.Job(variant, shape, microbatches=1, steps=1, profile=False))
    attention, head, norms = 128 * (128 + 2 * 64 + 128), 256 * 128, 3 * 128
    assert found["num_params"] == attention + 4 * 3 * 128 * 128 + 128 * 4 + 2 * head + norms
    assert abs(found["first_loss"] - np.log(shape.vocab_size)) < 0.5
    assert found["last_loss"] < found["first_loss"]


def test_places_are_each_tokens_own(benchmark):
    chosen = jax.random.randint(jax.random.key(0), (50, 2), 0, 5)
    token, slot = benchmark("plain_experts").places(chosen, 5, 24)
    token, slot, expert = (np.asarray(array) for array in (token, slot, chosen))
    kept = slot < 5 * 24
    assert (slot[kept] // 24 == expert[kept]).all() and len(set(slot[kept])) == kept.sum()
    assert (token[slot[kept]] == np.nonzero(kept)[0]).all() and (token < 50).sum() == kept.sum()
    assert kept.sum() == sum(min(24, (expert == e).sum()) for e in range(5))


def test_flax_has_no_experts_in_fp8(shape, benchmark):
    with pytest.raises(ValueError, match="Flax's own FP8 has no experts"):
        shape.plain(benchmark("variants").PLAIN_DOTS["flax_direct"])
