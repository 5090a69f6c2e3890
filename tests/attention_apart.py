"""Attention that has the same bits in all programs; tests replace jax's by it while they make a step.

XLA adds up a softmax in one order where the backward recomputes it, and in another where a pipeline keeps it from tick
to tick, or where it is fused with something else. The last bit of a sum can change a value in FP8, and so a gradient by
6e-5.
"""

import functools

import jax
from jax import lax

XLAS_ATTENTION = jax.nn.dot_product_attention


def attention_apart(*operands: jax.Array, **options) -> jax.Array:
    """`jax.nn.dot_product_attention`, recomputed in the backward, and never fused with operations around it."""
    attend = functools.partial(XLAS_ATTENTION, **options)

    @jax.custom_vjp
    def run(*operands):
        return lax.optimization_barrier(attend(*lax.optimization_barrier(operands)))

    def backward(operands, gradient):
        operands, gradient = lax.optimization_barrier((operands, gradient))
        _, pull = jax.vjp(attend, *operands)
        return lax.optimization_barrier(pull(gradient))

    run.defvjp(lambda *operands: (run(*operands), operands), backward)
    return run(*operands)
