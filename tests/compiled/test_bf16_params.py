"""A training step of bfloat16 params compiled for an H200 with no GPU:
GEMMs write their gradients as Adam reads them.
"""

import h200
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.kernels import extension
from jax_fp8.ops import passes
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

CONFIG = fp8.GPTConfig(vocab_size=512, num_layers=1, num_heads=4, hidden_size=256, max_seq_len=128)
KERNELS = (256, 256), (256, 1024), (1024, 256)
TOKENS = (16, 129)


def compiled_step() -> h200.Program:
    model = fp8.GPT(CONFIG, param_dtype=jnp.bfloat16)
    tx = fp8.fused_adamw(1e-3, master_dtype="remainder")
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, model.recipe, compiler_options=CUDA_GRAPH_OPTIONS)

    def create(tokens):
        return fp8.TrainState.create(variables=model.init(jax.random.key(0), tokens[:, :-1]), tx=tx)

    on = h200.on_one_device()
    tokens = jax.ShapeDtypeStruct(TOKENS, jnp.int32)
    return h200.compile(step, h200.shapes(jax.eval_shape(create, tokens), on), h200.shapes(tokens, on))


def cast_afterwards() -> h200.Program:
    """What a gradient in float32 would be, without Adam: a control."""
    on = h200.on_one_device()
    x, dy = (jax.ShapeDtypeStruct((rows, 2048), fp8.E4M3, sharding=on) for rows in KERNELS[-1])
    scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=on)

    def gradient(x, dy, scale):
        product = fp8.matmul(Fp8Array(x, scale), Fp8Array(dy, scale), dtype=jnp.float32)
        return product.astype(jnp.bfloat16)

    return h200.compile(jax.jit(gradient), x, dy, scale)


def made_of_kernels(program: h200.Program) -> int:
    return sum(len(program.making(dtype, *shape)) for dtype in ("f32", "bf16") for shape in KERNELS)


def test_no_gradient_of_a_kernel_is_cast(monkeypatch):
    monkeypatch.setattr(passes, "SMALLEST_WGRAD", 0)  # as of a model of a size that pays
    program = compiled_step()
    assert made_of_kernels(program) == 0
    assert program.custom_calls["jax_fp8_adam"] == program.graphs == 1
    written = {call.results[0] for call in program.instructions if call.target == "jax_fp8_gemm"}
    assert {("bf16", shape) for shape in KERNELS} <= {(result.dtype, result.shape) for result in written}
    assert made_of_kernels(cast_afterwards()) > 0
