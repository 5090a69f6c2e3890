"""Small mixtures of experts, and steps of them on a mesh or on one device."""

import functools

import jax
import jax.numpy as jnp
from hybrid import SEQ, first_state, gpt, tokens, train
from reference import assert_same_bits

import jax_fp8 as fp8

FIRST_SUMS = 5e-4  # of gradients; 2e-5 seen
LOSS = 2e-5
RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=4), "current": fp8.CurrentScaling(), "block": fp8.BlockScaling(),
    "none": None,
}  # fmt: skip
MODELS = {
    "softmax": {},
    "few tokens": {"num_experts": 8, "experts_per_token": 1},
    "shared": {
        "router_scores": "sigmoid", "router_correction_bias": True, "router_aux_loss": 0.0, "router_scale": 2.5,
        "expert_groups": 2, "shared_expert_features": 64,
    },
}  # fmt: skip


def model_of(recipe, model="softmax", **fields):
    dtype = {"dtype": jnp.float32} if recipe == "none" else {}
    config = {"num_layers": 1, "num_experts": 4, "experts_per_token": 2, "activation": "swiglu"} | MODELS[model]
    return gpt(RECIPES[recipe], **dtype, **(config | fields))


@functools.cache
def state_of(recipe, model="softmax"):
    return first_state(model_of(recipe, model).init, jnp.zeros((1, SEQ), jnp.int32))


def trained(recipe, axes=None, model="softmax", batch=None, state=None, steps=2, recompute=False, **options):
    batch = tokens() if batch is None else batch
    loss = fp8.next_token_loss(model_of(recipe, model, recompute=recompute))
    return train(loss, state or state_of(recipe, model), batch, RECIPES[recipe], axes=axes, steps=steps, **options)


on_one_device = functools.cache(trained)


def assert_same_trees(found, wanted):
    jax.tree.map(assert_same_bits, found, wanted)
