"""How good a model is: its loss on held-out text, and what it writes.

Both are plain jitted functions of variables that stay where training has put them. On several devices the compiler
splits them, and all processes run them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

import jax_fp8 as fp8

TEMPERATURE = 0.8  # of what is written: below 1 prefers likely tokens


def make_validation(loss_fn: Callable[[Any, jax.Array], jax.Array]) -> Callable[[Any, jax.Array], jax.Array]:
    """The mean loss of batches (count, batch, seq + 1): one program, for which the host need not wait."""

    @jax.jit
    def mean_loss(variables, batches):
        return jnp.mean(jax.lax.map(partial(loss_fn, variables), batches))

    return mean_loss


def make_writer(model: fp8.GPT, mesh: Mesh) -> Callable[[Any, ArrayLike, jax.Array], jax.Array]:
    """What a model writes after a window (rows, seq), all of whose rows are alike: one token for each key.

    The model always reads a full window, so one compiled program makes every token: read, draw, shift.
    """

    @partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def write(variables, window, keys):
        def write_one(window, key):
            logits = model.apply(variables, window)[:, -1].astype(jnp.float32)  # (rows, vocab)
            token = jax.random.categorical(key, logits / TEMPERATURE).astype(jnp.int32)
            return jnp.concatenate([window[:, 1:], token[:, None]], axis=1), token[0]

        return jax.lax.scan(write_one, window, keys)[1]

    return write
