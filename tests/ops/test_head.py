"""The head's logits and gradients against float64, in bfloat16 and FP8; that FP8 GEMMs are called;
the bound of what is quantized unmeasured.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jax_fp8.core.recipe import CurrentScaling
from jax_fp8.ops.cross_entropy import linear_cross_entropy
from jax_fp8.ops.head import compute_logits, make_head

BATCH, SEQ, HIDDEN, VOCAB = 2, 16, 32, 80
RECIPES = {"bfloat16": None, "linear": CurrentScaling()}  # by the tolerance that belongs to it


def inputs():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(BATCH, SEQ, HIDDEN)), rng.normal(size=(VOCAB, HIDDEN))
    dlogits = rng.normal(size=(BATCH, SEQ, VOCAB))
    return x.astype(jnp.bfloat16), weight.astype(np.float32), dlogits.astype(jnp.bfloat16)


@partial(jax.jit, static_argnums=3)
def differentiate(x, weight, dlogits, recipe):
    logits, pullback = jax.vjp(lambda x, weight: compute_logits(x, weight, recipe), x, weight)
    return logits, *pullback(dlogits)


def exact(array):
    return np.asarray(array).astype(np.float64)


@pytest.mark.parametrize("kind", RECIPES)
def test_logits_and_their_gradients(kind):
    x, weight, dlogits = inputs()
    logits, dx, dweight = differentiate(x, weight, dlogits, RECIPES[kind])
    gradient = kind.replace("linear", "linear_gradient")
    reference.assert_close(logits, exact(x) @ exact(weight).T, kind)
    reference.assert_close(dx, exact(dlogits) @ exact(weight), gradient)
    reference.assert_close(dweight, np.einsum("bsv,bsh->vh", exact(dlogits), exact(x)), gradient)
    with pytest.raises(AssertionError, match="relative error"):
        reference.assert_close(logits, exact(x) @ exact(weight[::-1]).T, kind)


@pytest.mark.parametrize("kind", RECIPES)
def test_the_products_of_a_part(kind):
    """The same from the pieces that the loss uses, with the weight's gradient added to a total."""
    x, weight, dlogits = inputs()
    total, bound = np.full((VOCAB, HIDDEN), 3, np.float32), reference.amax(dlogits)

    @jax.jit
    def by_pieces(x, weight, dlogits):
        head = make_head(x, weight, RECIPES[kind])
        operand = head.operand(x)
        return head.logits(operand), *head.gradients(dlogits, operand, total, bound)

    logits, dx, dweight = by_pieces(x, weight, dlogits)
    reference.assert_same_bits(logits, differentiate(x, weight, dlogits, RECIPES[kind])[0])
    gradient = kind.replace("linear", "linear_gradient")
    reference.assert_close(dx, exact(dlogits) @ exact(weight), gradient)
    reference.assert_close(dweight - total, np.einsum("bsv,bsh->vh", exact(dlogits), exact(x)), gradient)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_no_gradient_of_a_logit_is_larger_than_its_bound(z_loss):
    """Or it would be clipped: with logits as wrong as can be, the gradient of the weight is that of float64."""
    x = 50 * np.eye(SEQ, HIDDEN, dtype=jnp.bfloat16)[None]
    weight = np.eye(VOCAB, HIDDEN, dtype=np.float32)
    labels = np.full((1, SEQ), VOCAB - 1)  # the likeliest token is never the label

    def loss(weight, recipe):
        return SEQ * linear_cross_entropy(x, weight, labels, z_loss=z_loss, recipe=recipe)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    actual, expected = (gradient(weight, recipe) for recipe in (CurrentScaling(), None))
    reference.assert_close(actual, expected, "float8_e5m2")
    assert np.max(np.abs(expected)) > 40


def test_the_custom_calls(with_kernels):
    """Three GEMMs a chunk, one of 16 rows; each operand cast once, the weight and the whole input measured once."""
    x, weight, _ = inputs()
    labels = np.zeros((BATCH, SEQ), np.int32)
    step = jax.jit(jax.grad(lambda *args: linear_cross_entropy(*args, recipe=CurrentScaling(), chunks=2), (0, 1)))
    text = step.trace(x, weight, labels).lower(lowering_platforms=("cuda",)).as_text()
    names = "gemm", "few_rows_gemm", "quantize_transpose", "amax"
    calls = {name: text.count(f"@jax_fp8_{name}(") for name in names}
    assert calls == {"gemm": 2 * 2, "few_rows_gemm": 2, "quantize_transpose": 1 + 2 * 2, "amax": 2}
