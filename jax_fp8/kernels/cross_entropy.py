"""The loss of every token from its logits, and its gradient, written over the logits:
one kernel reads a row once, and keeps it on the multiprocessor.

    lse = log sum exp logits      loss = lse - logits[label] + z_loss lse²
    dlogits = softmax(logits) (1 + 2 z_loss lse) - onehot(label)

For z_loss see https://arxiv.org/abs/2204.02311, section 5. Both are multiplied by the share of a token in the mean.
`ops/cross_entropy.py` makes of this the loss of a model's head.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.ids import as_ids, is_token
from jax_fp8.kernels.dispatch import Split, dispatch, split_axes

TARGET = "jax_fp8_cross_entropy"
NAN_BITS = np.uint32(0x7FC00000)


def cross_entropy_gradient(
    logits: jax.Array, labels: jax.Array, shares: jax.Array, z_loss: float, vocab_axes: tuple[str, ...] = ()
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradient of the loss by logits that are not needed afterwards: it is written over them.

    Args:
      logits: (batch, seq, vocab) in float32, bfloat16 or float16.
      labels: int (batch, seq), of any integer dtype. One that is not in [0, vocab) makes its own row NaN.
      shares: f32 (batch, seq): what a token's loss is multiplied by.
      z_loss: as in `linear_cross_entropy`.
      vocab_axes: Manual mesh axes that split the vocabulary; labels are those of the whole. This runs without a kernel
        of ours, in three passes over the logits instead of one.

    Returns:
      The gradient, like the logits; `shares (lse - logits[label] + z_loss lse²)` and `lse`, both f32 (batch, seq).
    """
    _check_logits(logits, labels, shares)
    labels = as_ids(labels)
    if vocab_axes:
        return _reference(z_loss, logits, labels, shares, {"v": vocab_axes})
    kernel, reference = partial(_kernel, z_loss), partial(_reference, z_loss)
    rule = "b s v, b s, b s -> b s v, b s, b s"
    gradient, loss, lse = dispatch(rule, kernel, reference, logits, labels, shares)
    return gradient, loss, lse


def nan_unless(condition: jax.Array, x: jax.Array) -> jax.Array:
    """Float32 `x`, NaN where the condition is false: chosen among bits, for nothing shall compute a NaN by itself."""
    bits = jnp.where(condition, lax.bitcast_convert_type(x, jnp.uint32), NAN_BITS)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _check_logits(logits: jax.Array, labels: jax.Array, shares: jax.Array):
    if logits.ndim != 3 or not labels.shape == shares.shape == logits.shape[:2]:
        raise ValueError(
            "cross_entropy_gradient needs logits (batch, seq, vocab) and labels and shares (batch, seq), "
            f"got {logits.shape}, {labels.shape} and {shares.shape}; reshape them"
        )
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"cross_entropy_gradient needs float32, bfloat16 or float16, got {logits.dtype}; cast first")


def _kernel(z_loss: float, logits: jax.Array, labels: jax.Array, shares: jax.Array, split: Split):
    if split_axes(split, "v"):
        return _reference(z_loss, logits, labels, shares, split)
    rows, vocab = labels.size, logits.shape[-1]
    row = jax.ShapeDtypeStruct((rows,), jnp.float32)
    results = jax.ShapeDtypeStruct((rows, vocab), logits.dtype), row, row
    call = jax.ffi.ffi_call(TARGET, results, input_output_aliases={0: 0})
    arguments = logits.reshape(rows, vocab), labels.reshape(rows), shares.reshape(rows)
    gradient, loss, lse = call(*arguments, z_loss=np.float32(z_loss))
    return gradient.reshape(logits.shape), loss.reshape(labels.shape), lse.reshape(labels.shape)


def _reference(z_loss: float, logits: jax.Array, labels: jax.Array, shares: jax.Array, split: Split):
    axes = split_axes(split, "v")  # of a split vocabulary, this shard has the tokens from `first` on
    first = lax.axis_index(axes) * logits.shape[-1] if axes else 0
    vocab = logits.shape[-1] * (lax.axis_size(axes) if axes else 1)
    shares = nan_unless(is_token(labels, vocab), shares)[..., None]
    dtype, logits = logits.dtype, logits.astype(jnp.float32)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    largest = lax.pmax(largest, axes) if axes else largest
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    is_label = labels[..., None] - first == jnp.arange(logits.shape[-1])[None, None, :]
    total, chosen = _sums(axes, jnp.exp(logits - largest), jnp.where(is_label, logits, 0))
    lse = jnp.log(total) + largest
    gradient = (jnp.exp(logits - lse) * (1 + 2 * z_loss * lse) - is_label.astype(jnp.float32)) * shares
    loss = (lse - chosen + z_loss * jnp.square(lse)) * shares
    return gradient.astype(dtype), loss[..., 0], lse[..., 0]


def _sums(axes: tuple[str, ...], *arrays: jax.Array):
    """Sums over the last dim, those of all arrays in one collective."""
    sums = jnp.stack([jnp.sum(x, axis=-1, keepdims=True) for x in arrays])
    return lax.psum(sums, axes) if axes else sums
