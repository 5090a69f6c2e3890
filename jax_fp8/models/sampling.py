"""One token for each row of logits: the most likely one, or one drawn at random from the likely ones.

logits / temperature → the top_k most likely → of these the fewest that have probability top_p → draw
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Below this temperature, logits / temperature may overflow float32, so the largest logit is subtracted first.
COLD = np.float32(1e-20)
SMALLEST = np.finfo(np.float32).tiny  # XLA flushes smaller numbers to zero


def choose_tokens(
    logits: jax.Array,
    keys: jax.Array | None,
    temperature: jax.Array,
    top_k: int | None,
    top_p: jax.Array | None,
) -> jax.Array:
    """The tokens i32[batch] of logits f32[batch, vocab].

    Args:
      keys: random keys (batch,), so that the draw of a row does not depend on other rows; None takes the most likely
        token.
      temperature: f32[], positive; below 1 prefers likely tokens. A very small one draws the most likely token, or one
        of several that are equally likely.
      top_k: draw from so many most likely tokens, never from more, even where several are equally likely; None: all.
      top_p: f32[], above 0: draw a token only if all more likely ones together have less than this probability. These
        are probabilities among the tokens that `top_k` leaves. None: no limit.
    """
    if keys is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    shift = jnp.where(temperature < COLD, jnp.max(logits, axis=-1, keepdims=True), 0)
    logits = (logits - shift) / jnp.maximum(temperature, SMALLEST)
    draw = jax.vmap(jax.random.categorical)
    if top_k is None and top_p is None:
        return draw(keys, logits).astype(jnp.int32)
    likely, tokens = lax.top_k(logits, min(top_k or logits.shape[-1], logits.shape[-1]))
    if top_p is not None:
        probabilities = jax.nn.softmax(likely, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        likely = jnp.where(before < jnp.maximum(top_p, SMALLEST), likely, -jnp.inf)
    drawn = draw(keys, likely)[:, None]
    return jnp.take_along_axis(tokens, drawn, axis=-1)[:, 0].astype(jnp.int32)
