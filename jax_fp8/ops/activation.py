"""Activations of a Transformer MLP, plain and gated, computed in float32.

A gated activation (https://arxiv.org/abs/2002.05202) takes (..., 2n), the gate in the first half, and returns `f(gate) * linear`, (..., n).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp


def gelu_tanh(x: jax.Array) -> jax.Array:
    """`x (1 + tanh(u)) / 2` with `u = sqrt(2 / pi) (x + 0.044715 x³)`, as in GPT-2 and Flax (https://arxiv.org/abs/1606.08415).

    Written as `x sigmoid(2u)`, which is the same function: on a GPU an exponential and a division cost less than XLA's float32 tanh.
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


def activate(x: jax.Array, activation: str) -> jax.Array:
    """Apply an activation to (..., n), or a gated one to (..., 2n): (..., n) in the dtype of `x`."""
    if not is_gated(activation):
        return PLAIN[activation](x.astype(jnp.float32)).astype(x.dtype)
    gate, linear = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return (GATED[activation](gate) * linear).astype(x.dtype)


def activate_backward(dy: jax.Array, x: jax.Array, activation: str) -> jax.Array:
    """The gradient of `x`, recomputing the activation: nothing but its input is kept."""
    _, pullback = jax.vjp(partial(activate, activation=activation), x)
    return pullback(dy)[0]
