"""What a layer keeps for its backward, in bytes a token,
from the scratch memory of models compiled for an H200 with no GPU.

Attention is XLA's own here; the sizes are such that gradients and weights, which do not grow with tokens, hardly count.
"""

import flax.linen as nn
import h200
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.kernels import extension
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

WIDTH, SEQUENCE, BATCH = 256, 128, 256
RECIPE = fp8.DelayedScaling(amax_history_len=2)


class Stack(nn.Module):
    layers: int
    recompute: bool

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = fp8.TransformerBlock(2, 4 * WIDTH, recipe=RECIPE, recompute=self.recompute)(x)
        return x


def scratch_bytes(layers, recompute) -> int:
    """Of a gradient whose weights are in FP8 already."""
    model, x = Stack(layers, recompute), jax.ShapeDtypeStruct((BATCH, SEQUENCE, WIDTH), jnp.bfloat16)
    variables = dict(jax.eval_shape(model.init, jax.random.key(0), x))
    variables["fp8_cache"] = jax.eval_shape(lambda v: fp8.cast_weights(v, RECIPE), variables)

    def gradient(variables, x):
        return fp8.value_and_grad(lambda v: jnp.sum(model.apply(v, x).astype(jnp.float32)))(variables)

    on = h200.on_one_device()
    step = jax.jit(gradient, compiler_options=CUDA_GRAPH_OPTIONS)
    return h200.compile(step, h200.shapes(variables, on), h200.shapes(x, on)).temp_bytes


def kept_by_a_layer(recompute) -> float:
    """In numbers of its width, a byte each, for a token; not of the last layer, which needs more than it keeps."""
    two, three = (scratch_bytes(layers, recompute) for layers in (2, 3))
    return (three - two) / (BATCH * SEQUENCE * WIDTH)


@pytest.mark.slow
def test_recomputing_keeps_two_bytes_fewer_for_each_feature():
    """One for the input of qkv and one for that of the MLP."""
    kept, recomputed = kept_by_a_layer(recompute=False), kept_by_a_layer(recompute=True)
    assert kept - recomputed == pytest.approx(2, abs=0.1)
    assert kept == pytest.approx(27, abs=0.1)  # 31 if the activated tensor were kept
