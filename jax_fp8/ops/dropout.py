"""Dropout: sets random elements of a branch to zero and scales up the others, so that the mean stays the same.

    y = x / (1 - rate) where the key keeps it, else 0          (https://jmlr.org/papers/v15/srivastava14a.html)
      + residual, which is not dropped

The backward draws the mask from the key again, so only the key is kept. A recomputed forward draws the same mask.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.shards import TensorParallel
from jax_fp8.kernels.explicit import explicit_mesh


def dropout(
    x: jax.Array, key: jax.Array, rate: float, residual: jax.Array | None = None, tensor: TensorParallel | None = None
) -> jax.Array:
    """Drop elements of `x`, and add a residual of the same shape and dtype; computed in float32 and rounded once.

    Args:
      key: one random key.
      rate: how likely an element is dropped, at least 0 and below 1.
      tensor: in a step on shards, the axis over which layers are split. With sequence parallelism each of its devices
        has other rows, and draws a mask of its own.
    """
    if tensor is not None and tensor.sequence:
        key = jax.random.fold_in(key, lax.axis_index(tensor.axis))
    return _dropout(rate, x, residual, key)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dropout(rate: float, x: jax.Array, residual: jax.Array | None, key: jax.Array):
    kept = _kept(rate, x, key)
    total = kept if residual is None else kept + residual.astype(jnp.float32)
    return total.astype(x.dtype)


def _kept(rate: float, x: jax.Array, key: jax.Array) -> jax.Array:
    """`x` with dropped elements zero and the others scaled, float32."""
    sharding = None if explicit_mesh(x) is None else jax.typeof(x).sharding
    is_kept = jax.random.bernoulli(key, 1 - rate, x.shape, out_sharding=sharding)
    return jnp.where(is_kept, x.astype(jnp.float32) / (1 - rate), 0)


def _forward(rate: float, x: jax.Array, residual: jax.Array | None, key: jax.Array):
    return _dropout(rate, x, residual, key), (key, residual is not None)


def _backward(rate: float, kept: tuple, dy: jax.Array):
    key, has_residual = kept
    return _kept(rate, dy, key).astype(dy.dtype), dy if has_residual else None, None


_dropout.defvjp(_forward, _backward)
