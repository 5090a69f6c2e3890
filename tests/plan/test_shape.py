"""The shape of a GPT: as many params as the model has."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.plan.gpt_plans import shape_of
from jax_fp8.plan.shape import Shape

GPT = Shape(layers=4, width=1024, heads=16, kv_heads=16, mlp=4096, vocab=50_304)
LLAMA = Shape(layers=4, width=1024, heads=16, kv_heads=4, mlp=3584, vocab=50_304, is_gated=True, is_tied=False)
WIDE = replace(LLAMA, head_dim=128)


@pytest.mark.parametrize("shape", [GPT, LLAMA, WIDE], ids=["gpt", "llama", "wide heads"])
def test_params_are_those_of_a_model(shape):
    config = fp8.GPTConfig(
        num_layers=shape.layers,
        num_heads=shape.heads,
        hidden_size=shape.width,
        vocab_size=shape.vocab,
        num_kv_heads=shape.kv_heads,
        mlp_hidden_size=shape.mlp,
        activation="swiglu" if shape.is_gated else "gelu",
        positions="rotary",
        tie_embeddings=shape.is_tied,
        head_dim=shape.head_dim,
    )
    assert shape_of(config) == shape
    model = fp8.GPT(config, recipe=None)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
    matrices = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
    assert shape.of_layers + shape.of_tables == matrices
