"""Layers without FP8: the textbook formulas in float64, with JAX's gradients.

They were written independently of the library, whose forwards and hand-written backwards tests compare with these.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf

ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + jnp.exp(-x)),
    "relu": lambda x: jnp.where(x > 0, x, 0.0),
    "squared_relu": lambda x: jnp.where(x > 0, x * x, 0.0),
}
GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}


def activate(x, activation):
    """A plain activation of (..., n), or a gated one of (..., 2n) with the gate in the first half."""
    if activation not in GATES:
        return ACTIVATIONS[activation](x)
    half = x.shape[-1] // 2
    return ACTIVATIONS[GATES[activation]](x[..., :half]) * x[..., half:]


def normalize(x, norm, epsilon):
    """RMSNorm without `norm.bias`, LayerNorm with it."""
    if norm.bias is None:
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * norm.scale
    variance = jnp.mean(x * x, axis=-1, keepdims=True) - jnp.mean(x, axis=-1, keepdims=True) ** 2
    return (x - jnp.mean(x, axis=-1, keepdims=True)) / jnp.sqrt(variance + epsilon) * norm.scale + norm.bias


def linear(x, parameters):
    y = x @ parameters.kernel
    return y if parameters.bias is None else y + parameters.bias


def result_and_gradients(fn, output_gradient, *args):
    """`fn(*args)` and the gradients of all args, NumPy float64; args may be any pytrees of arrays."""

    def run(output_gradient, *args):
        result, pullback = jax.vjp(fn, *args)
        return result, pullback(output_gradient)

    with jax.enable_x64(True):
        in_float64 = jax.tree.map(lambda array: np.asarray(array).astype(np.float64), (output_gradient, *args))
        return jax.tree.map(np.asarray, jax.jit(run)(*in_float64))
