"""Validation and sample of a run, compiled for four H200s with cuDNN's attention: on every mesh they are programs
that the compiler splits by itself, and what runs on CPU devices need not compile for a GPU.
"""

import math

import h200
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.kernels import extension
from jax_fp8.run import generate, train

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

BATCH, SEQ = 8, 192
# One mesh that splits params both ways, and one with stages; the slow ones split by one axis beside `data`.
MESHES = [
    pytest.param({"data": 2, "fsdp": 1, "tensor": 2}, marks=pytest.mark.slow),
    {"data": 1, "fsdp": 2, "tensor": 2},
    pytest.param({"data": 2, "fsdp": 2, "tensor": 1}, marks=pytest.mark.slow),
    {"pipe": 2, "data": 1, "fsdp": 1, "tensor": 2},
]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_validation_and_sample(axes, monkeypatch, with_kernels):
    mesh = h200.mesh(**axes)
    layers = stages = axes.get("pipe", 1)
    config = fp8.GPTConfig(vocab_size=1024, num_layers=layers, num_heads=8, hidden_size=256, max_seq_len=SEQ)
    model, tx = fp8.GPT(config), fp8.fused_adamw(1e-3)
    loss_fn = fp8.next_token_loss(model)
    step = fp8.make_train_step(loss_fn, tx, model.recipe, stages, parallel=mesh, compiler_options={})
    state = step.state_shapes(model.init, jax.random.key(0), jnp.zeros((BATCH, SEQ), jnp.int32))

    # From here on as on a machine with GPUs.
    h200.use_cudnn(monkeypatch)

    def tokens(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))

    batches = tokens(4, BATCH, SEQ + 1, spec=P(None, ("data", "fsdp")))
    validation = h200.compile(train.make_validation(loss_fn), state.variables, batches)

    @jax.jit
    def write(variables, prompt):  # what `sample` runs, of this prompt
        key = jax.random.key(0)
        return fp8.generate(model, variables, prompt, max_new_tokens=8, temperature=generate.TEMPERATURE, key=key)

    sample = h200.compile(write, state.variables, tokens(1, SEQ // 2, spec=P()))
    for program, of_tokens in ((validation, 0), (sample, 4)):  # tokens after the prompt, in a pass of their own
        assert program.custom_calls["jax_fp8_gemm"] == 6 * layers  # query, key, value, out, up, down
        assert program.custom_calls["jax_fp8_few_rows_gemm"] == of_tokens * layers  # the first three at once
        assert sum(count for target, count in program.custom_calls.items() if "fmha" in target) == layers
    # No device gathers a weight for each token.
    weights = (i.operands[1].shape for i in sample.instructions if i.target == "jax_fp8_few_rows_gemm")
    assert sum(map(math.prod, weights)) == layers * 12 * 256**2 // (mesh.size // axes["data"])
