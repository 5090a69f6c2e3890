"""Lookup in an embedding table whose vocabulary may be split over a mesh axis.

Each device looks up its own tokens, and takes zeros for the others. The sum over the devices has every token's row;
only one term of it is not zero, so it does not round. The device that has a row adds up its gradients in float32.

A token id outside of the vocabulary gets a row of NaN. So a wrong id makes the loss NaN, where another token's row
would only make it a little worse.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.ids import as_ids, check_ids, is_token
from jax_fp8.core.shards import TensorParallel
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.cross_entropy import nan_unless
from jax_fp8.kernels.explicit import lookup
from jax_fp8.ops.collectives import gather_rows, reduce_rows


def embed(table: jax.Array, tokens: jax.Array, tensor: TensorParallel | None, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The rows of `table` (vocab, hidden) for tokens (batch, seq) of any integer dtype; NaN for ids outside of it.

    Args:
      tensor: in a step on shards, the axis that splits the vocabulary, or None.
      dtype: of the rows in collectives.

    Returns:
      (batch, seq, hidden): float32, or in `dtype` with `tensor`; with sequence parallelism this device's part of the
      rows, (batch, seq / size, hidden).
    """
    check_ids("tokens", tokens)
    tokens = as_ids(tokens)
    if tensor is None:
        return lookup(table.astype(jnp.float32), tokens)
    if tensor.sequence and tokens.shape[-1] % tensor.size:
        raise ValueError(
            f"sequence parallelism over {tensor.axis}={tensor.size} needs sequences that it divides, "
            f"got tokens {tokens.shape}; pad the sequence, or leave sequence_parallel out"
        )
    rows: PyTree = _embed((tensor, dtype), table, tokens.reshape(-1))
    return rows.reshape(*tensor.own_rows(tokens.shape), -1)


def position_rows(
    positions: jax.Array, tokens: tuple[int, ...], tensor: TensorParallel | None, numbers: jax.Array | None = None
) -> jax.Array:
    """The position embeddings to add to the rows that `embed` returns.

    Args:
      positions: (max_seq_len, hidden), the table.
      tokens: the shape (batch, seq).
      numbers: int (batch, seq), the position of each token; None: 0, 1, ... A position outside of the table gets NaN.

    Returns:
      (seq, hidden) or (batch, seq, hidden); with sequence parallelism those of this device's rows.
    """
    batch, seq = tokens
    if tensor is None or not tensor.sequence:
        return positions[:seq] if numbers is None else lookup(positions, numbers)
    own = batch * seq // tensor.size
    own_rows = lax.axis_index(tensor.axis) * own + jnp.arange(own)
    of_rows = own_rows % seq if numbers is None else numbers.reshape(-1)[own_rows]
    return lookup(positions, of_rows).reshape(*tensor.own_rows(tokens), -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embed(static: tuple[TensorParallel, jax.typing.DTypeLike], table: jax.Array, tokens: jax.Array) -> jax.Array:
    tensor, dtype = static
    own, is_own = _own_tokens(tensor, table, tokens)
    missing = nan_unless(is_token(tokens, tensor.size * table.shape[0]), jnp.zeros(tokens.shape, jnp.float32))
    rows = jnp.where(is_own[:, None], table[jnp.where(is_own, own, 0)], missing[:, None].astype(table.dtype))
    return reduce_rows(rows.astype(dtype), tensor)


def _forward(static: tuple[TensorParallel, jax.typing.DTypeLike], table: jax.Array, tokens: jax.Array):
    return _embed(static, table, tokens), (jnp.zeros((table.shape[0], 0), table.dtype), tokens)


def _backward(static: tuple[TensorParallel, jax.typing.DTypeLike], kept: tuple, dx: jax.Array):
    (tensor, _), (like, tokens) = static, kept
    own, is_own = _own_tokens(tensor, like, tokens)
    dx = gather_rows(dx, tensor).astype(jnp.float32)
    vocab = like.shape[0]
    gradient = jnp.zeros((vocab, dx.shape[-1]), jnp.float32).at[jnp.where(is_own, own, vocab)].add(dx, mode="drop")
    return gradient.astype(like.dtype), None


_embed.defvjp(_forward, _backward)


def _own_tokens(tensor: TensorParallel, table: jax.Array, tokens: jax.Array):
    """The row of each token in this device's part of the table, and whether it is in that part."""
    own = tokens - lax.axis_index(tensor.axis) * table.shape[0]
    return own, (own >= 0) & (own < table.shape[0])
