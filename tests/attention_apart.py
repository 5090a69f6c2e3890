"""Attention that has the same bits in all programs, to put in the place of jax's while a step is made.

XLA adds up a softmax in one order where the backward computes it again, and in another where it is kept from tick to
tick of a pipeline, or fused with something else. A last bit of that can make another value in FP8, and a gradient that
is 6e-5 away.
"""

import functools

import jax
from jax import lax

XLAS_ATTENTION = jax.nn.dot_product_attention


def attention_apart(*operands: jax.Array, **options) -> jax.Array:
    """`jax.nn.dot_product_attention`, computed again in the backward, and fused with nothing around it."""
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
