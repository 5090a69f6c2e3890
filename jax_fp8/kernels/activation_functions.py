"""Activations of a Transformer MLP, plain and gated, and their gradients, computed in float32.

A gated activation (https://arxiv.org/abs/2002.05202) takes (..., 2n), the gate in the first half, and returns
`f(gate) * linear`, (..., n).

Rows of a matrix may have weights, as those of a mixture of experts do: row i of the result is `w[i] * f(x[i])`.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def gelu_tanh(x: jax.Array) -> jax.Array:
    """`x (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) (x + 0.044715 x³)` (https://arxiv.org/abs/1606.08415), as in GPT-2.

    Computed as `x sigmoid(2u)`, the same function: on a GPU an exponential and a division cost less than XLA's float32
    tanh.
    """
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


PLAIN = {
    "gelu": gelu_tanh,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
}
GATED = {"swiglu": PLAIN["silu"], "geglu": PLAIN["gelu"], "reglu": PLAIN["relu"]}


def is_gated(activation: str) -> bool:
    """Whether the activation halves its last dim; raises on an unknown name."""
    if activation not in PLAIN and activation not in GATED:
        raise ValueError(f"activation must be one of {(*PLAIN, *GATED)}, got {activation!r}")
    return activation in GATED


def activate(x: jax.Array, activation: str, row_weights: jax.Array | None = None) -> jax.Array:
    """Apply an activation to (..., n), or a gated one to (..., 2n): (..., n) in the dtype of `x`, rounded once.

    Args:
      row_weights: f32[m], for `x` (m, n).
    """
    y = _in_float32(x, activation)
    return (y if row_weights is None else y * row_weights[:, None]).astype(x.dtype)


def activate_backward(dy: jax.Array, x: jax.Array, activation: str, row_weights: jax.Array | None = None) -> jax.Array:
    """The gradient of `x`; recomputes the activation from its input."""
    _, pullback = jax.vjp(lambda x: activate(x, activation, row_weights), x)
    return pullback(dy)[0]


def row_weights_gradient(dy: jax.Array, x: jax.Array, activation: str) -> jax.Array:
    """The gradient f32[m] of row weights, `Σ dy · f(x)` of each row, for `dy` (m, n)."""
    dy, x = lax.optimization_barrier((dy, x))  # else the last bits depend on what else is computed from them
    return lax.optimization_barrier(jnp.sum(dy.astype(jnp.float32) * _in_float32(x, activation), axis=1))


def _in_float32(x: jax.Array, activation: str) -> jax.Array:
    if not is_gated(activation):
        return PLAIN[activation](x.astype(jnp.float32))
    gate, linear = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return GATED[activation](gate) * linear
