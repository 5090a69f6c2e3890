"""The step of a model with heads as Qwen's, compiled for an H200: one CUDA graph, all GEMMs of layers in FP8, and norms
of heads that keep no more than what they are made of.
"""

import dataclasses

import h200
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.kernels import extension
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

LLAMA = fp8.GPTConfig.preset("tiny-llama", num_layers=2, hidden_size=256, head_dim=128, vocab_size=512)
QWEN = dataclasses.replace(
    LLAMA, qk_norm=True, use_qkv_bias=True, rotary_scaling=fp8.RotaryScaling(factor=8.0, original_length=64)
)
BATCH = (16, 129)
RECIPE = fp8.DelayedScaling(amax_history_len=16)


def step_of(config, monkeypatch) -> h200.Program:
    h200.use_cudnn(monkeypatch)
    model, tx = fp8.GPT(config, recipe=RECIPE), fp8.fused_adamw(1e-3)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, RECIPE, compiler_options=CUDA_GRAPH_OPTIONS)

    def create(tokens):
        return fp8.TrainState.create(variables=model.init(jax.random.key(0), tokens[:, :-1]), tx=tx)

    tokens = jax.ShapeDtypeStruct(BATCH, jnp.int32)
    return h200.compile(step, *h200.shapes((jax.eval_shape(create, tokens), tokens), h200.on_one_device()))


def test_a_step_is_one_graph_and_keeps_of_norms_what_enters_them(monkeypatch):
    plain, with_norms = (step_of(config, monkeypatch) for config in (LLAMA, QWEN))
    assert plain.graphs == with_norms.graphs == 1
    assert len(with_norms.copies) <= len(plain.copies)
    assert with_norms.custom_calls["jax_fp8_gemm"] == plain.custom_calls["jax_fp8_gemm"]
    normalized = QWEN.features_of_head * (QWEN.num_heads + QWEN.kv_heads)
    in_bfloat16 = 2 * QWEN.num_layers * BATCH[0] * (BATCH[1] - 1) * normalized
    # Beside what enters, statistics; in float32 it would be twice as much.
    assert with_norms.temp_bytes - plain.temp_bytes <= 1.3 * in_bfloat16
