"""The Llama-like baseline of the benchmarks computes what `GPT` does, from the same params, and as many FLOPs."""

import jax
import numpy as np
import pytest
from plain_params import as_plain

import jax_fp8 as fp8


@pytest.mark.parametrize("tied", [True, False])
def test_the_plain_model_is_ours(benchmark, tied):
    variants = benchmark("variants")
    shape = variants.dataclasses.replace(variants.SHAPES["tiny_llama"], num_layers=2, tied=tied)
    model = fp8.GPT(shape.config, recipe=None)
    tokens = jax.random.randint(jax.random.key(0), (2, 32), 0, shape.vocab_size)
    params = model.init(jax.random.key(1), tokens)["params"]
    leaves, treedef = jax.tree.flatten(params)
    params = treedef.unflatten([x + 0.1 * jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(leaves)])
    ours = np.asarray(model.apply({"params": params}, tokens), np.float32)

    def plain(params):
        return np.asarray(shape.plain(None).apply({"params": as_plain(params)}, tokens), np.float32)

    def distance(other):
        return float(np.linalg.norm(ours - other) / np.linalg.norm(ours))

    assert distance(plain(params)) < 0.03, distance(plain(params))  # of bfloat16
    mlp = params["layer_1"]["mlp"]
    params["layer_1"]["mlp"] = mlp | {"gate": mlp["up"], "up": mlp["gate"]}
    assert distance(plain(params)) > 0.1


def test_flops_count_what_is_multiplied(benchmark):
    shape = benchmark("variants").SHAPES["tiny_llama"]
    matrices = 64 * (64 + 2 * 16 + 64) + 3 * 64 * 96  # of the one layer
    head, norms = 256 * 64, 3 * 64
    attention = 6 * 32 * 64 // 2 * 2  # two products, half of the square, three times
    assert shape.flops(matrices + 2 * head + norms, 1) == 6 * (matrices + head + norms) + attention
