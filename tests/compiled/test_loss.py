"""The loss by chunks compiled for H200s with no GPU: what it holds at a time, and what it reduces over devices."""

import re
from functools import partial
from typing import Any

import h200
import jax
import jax.numpy as jnp
import optax
import pytest

import jax_fp8 as fp8
from jax_fp8.kernels import extension
from jax_fp8.ops.cross_entropy import linear_cross_entropy
from jax_fp8.ops.embedding import embed
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# As on a device, where every GEMM of XLA's is a fusion of its own until it is timed:
# nothing is added to its result in place.
TRITON_GEMMS = {"xla_gpu_enable_triton_gemm": True, "xla_gpu_autotune_level": 0}


def plain_head_and_loss(x, weight, labels):
    logits = jnp.einsum("bsh,vh->bsv", x, weight.astype(x.dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.mark.parametrize(("data", "held", "recipe"), [(1, 0.4, None), (1, 0.6, fp8.CurrentScaling()), (4, 1.1, None)])
def test_the_loss_never_holds_all_logits(data, held, recipe):
    """Nor, on one device, their gradient.

    On several it does, so that the gradient of the weight is reduced once, not once a chunk.
    """
    batch, seq, hidden, vocab = 8 * data, 2048, 256, 50304
    mesh = h200.mesh(data=data)
    rows, whole = h200.on_mesh(mesh, "data"), h200.on_mesh(mesh)
    arguments = (
        jax.ShapeDtypeStruct((batch, seq, hidden), jnp.bfloat16, sharding=rows),
        jax.ShapeDtypeStruct((vocab, hidden), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((batch, seq), jnp.int32, sharding=rows),
    )
    logits_bytes = 2 * 8 * seq * vocab  # of one device, in bfloat16
    ours, plain = (
        h200.compile(jax.jit(jax.value_and_grad(loss, (0, 1)), compiler_options=CUDA_GRAPH_OPTIONS), *arguments)
        for loss in (partial(linear_cross_entropy, recipe=recipe), plain_head_and_loss)
    )
    assert ours.temp_bytes < held * logits_bytes < 2 * logits_bytes < plain.temp_bytes
    assert not [copy for copy in ours.copies if copy.results[0].bytes >= hidden * vocab]
    assert ours.custom_calls["jax_fp8_cross_entropy"] == 4 * data  # chunks of 4,096 tokens
    assert ours.graphs == 1 or data > 1
    reduced = [instruction for instruction in ours.collectives if instruction.results[0].bytes > 4]
    assert len(reduced) == (data > 1)


def gradients(mesh, weight_spec, batch=8, seq=2048, hidden=256, vocab=50304, data=None, **options):
    """The program of loss and gradients in bfloat16."""
    arguments = (
        jax.ShapeDtypeStruct((batch, seq, hidden), jnp.bfloat16, sharding=h200.on_mesh(mesh, data)),
        jax.ShapeDtypeStruct((vocab, hidden), jnp.float32, sharding=h200.on_mesh(mesh, *weight_spec)),
        jax.ShapeDtypeStruct((batch, seq), jnp.int32, sharding=h200.on_mesh(mesh, data)),
    )
    step = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)), compiler_options=CUDA_GRAPH_OPTIONS)
    return h200.compile(step, *arguments, **options)


@pytest.mark.parametrize("options", [{}, TRITON_GEMMS], ids=["cublas", "triton"])
def test_what_is_made_of_logits_and_of_the_weights_gradient(options):
    """Logits by GEMMs alone, their gradient over them; the weight's gradient by four calls that add in place."""
    program = gradients(h200.mesh(data=1), (), **options)
    calls = [i.target for i in program.instructions if i.target in ("jax_fp8_cross_entropy", "jax_fp8_weight_gradient")]
    assert calls == 4 * ["jax_fp8_cross_entropy", "jax_fp8_weight_gradient"]  # in this order they run
    assert not [copy for copy in program.copies if copy.results[0].bytes > 2**20]
    logits_bytes = 2 * 4096 * 50304
    assert logits_bytes < program.temp_bytes < 1.5 * logits_bytes
    assert not program.making("f32", 50304, 256) and not program.making("bf16", 8, 256, 50304)
    assert [i for i in program.making("bf16", 50304, 256)]  # the weight is cast: what is looked for would be found


def test_a_split_vocabulary_is_not_gathered():
    """Then the loss is XLA's: maxima and sums over devices, and the logits stay where they are."""
    program = gradients(h200.mesh(tensor=2), ("tensor",))
    assert "jax_fp8_cross_entropy" not in program.custom_calls
    assert not [i for i in program.all_gathers if i.results[0].bytes >= 2 * 2048 * 50304]
    assert program.collectives


def test_a_row_of_what_is_no_token_costs_no_pass():
    """NaN is chosen where rows are gathered and cast; beside it zeros for the gradient, and what is added to them."""

    def rows_and_gradient(table, tokens, dx):
        rows, pull = jax.vjp(lambda table: embed(table, tokens, None, jnp.bfloat16).astype(jnp.bfloat16), table)
        return rows, pull(dx)

    shapes = ((50304, 768), jnp.float32), ((8, 1024), jnp.int32), ((8, 1024, 768), jnp.bfloat16)
    arguments = [jax.ShapeDtypeStruct(*of, sharding=h200.on_one_device()) for of in shapes]
    compiled = jax.jit(rows_and_gradient).lower(*arguments).compile()
    program: Any = compiled.as_text()
    assert len(re.findall(r" fusion\(", program.split("ENTRY")[1])) == 3
    analysis: Any = compiled.memory_analysis()
    assert analysis.temp_size_in_bytes == 0
