"""Activations of a Transformer MLP, plain and gated, computed in float32.

A gated activation (https://arxiv.org/abs/2002.05202) takes (..., 2n), the gate in the first half, and returns `f(gate) * linear`, (..., n).
"""

from functools import partial

import jax
import jax.numpy as jnp

PLAIN = {
    "gelu": partial(jax.nn.gelu, approximate=True),  # the tanh form, as in GPT-2 and Flax
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
