"""A soft cap on logits, of attention or of a head (https://arxiv.org/abs/2408.00118, section 2.1)."""

import jax
import jax.numpy as jnp


def capped(logits: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(logits / cap)`, between -cap and cap; None leaves the logits."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
