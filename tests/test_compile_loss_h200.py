"""The loss by chunks compiled for H200s with no GPU: what it holds at a time, and what it reduces over devices."""

from functools import partial

import h200
import jax
import jax.numpy as jnp
import optax
import pytest

import jax_fp8 as fp8
from jax_fp8.ops import kernels
from jax_fp8.ops.cross_entropy import linear_cross_entropy
from jax_fp8.train.train_step import CUDA_GRAPH_OPTIONS

REASON = h200.missing_reason() or kernels.missing_reason()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.program]


def plain_head_and_loss(x, weight, labels):
    logits = jnp.einsum("bsh,vh->bsv", x, weight.astype(x.dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.mark.parametrize(("data", "held", "recipe"), [(1, 0.5, None), (1, 0.5, fp8.CurrentScaling()), (4, 1.1, None)])
def test_the_loss_never_holds_all_logits(data, held, recipe):
    """Nor, on one device, their gradient. On several it does, so that the gradient of the weight is reduced once, not once a chunk."""
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
    reduced = [instruction for instruction in ours.collectives if instruction.results[0].bytes > 4]
    assert len(reduced) == (data > 1)
