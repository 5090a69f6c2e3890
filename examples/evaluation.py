"""How good a model is: its loss on held-out text, and what it writes.

Both are plain programs of variables that stay where training has put them. On several devices the compiler splits them,
and all processes run them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8

TEMPERATURE = 0.8  # of what is written: below 1 prefers likely tokens


def make_validation(loss_fn: Callable[[Any, jax.Array], jax.Array]) -> Callable[[Any, jax.Array], jax.Array]:
    """The mean loss of batches (count, batch, seq + 1): one program, for which the host need not wait."""

    @jax.jit
    def mean_loss(variables, batches):
        return jnp.mean(jax.lax.map(partial(loss_fn, variables), batches))

    return mean_loss


def write(model: fp8.GPT, variables: Any, prompt: np.ndarray, count: int, seed: int) -> np.ndarray:
    """What a model writes after a prompt (tokens,): so many tokens.

    It writes half a window at a time, and goes on from the last half of what is there.
    """
    key, half = jax.random.key(seed), max(1, model.config.max_seq_len // 2)
    text, end = prompt, len(prompt) + count
    while len(text) < end:
        key, own = jax.random.split(key)
        settings: Any = {"max_new_tokens": min(half, count), "temperature": TEMPERATURE, "key": own}
        text = np.append(text, fp8.generate(model, variables, text[None, -half:], **settings))
    return text[len(prompt) : end]
