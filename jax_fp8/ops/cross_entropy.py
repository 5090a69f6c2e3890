"""The head and its loss as one op: cross-entropy of `x · weightᵀ`, with logits computed chunk by chunk.

    logits = x · weightᵀ          lse = log sum exp logits
    loss = mean of  lse - logits[label] + z_loss lse²        (https://arxiv.org/abs/2204.02311, section 5, for z_loss)
    dlogits = softmax(logits) (1 + 2 z_loss lse) - onehot(label)

The logits of a batch are the largest array of a training step, and their gradient is as large. The loss is a mean, so
its gradient is known up to a factor as soon as the logits are. The forward pass therefore computes the gradients of
`x` and `weight` chunk by chunk, and keeps these instead of the logits.

    chunk of x ─· weightᵀ→ logits → loss, dlogits ─· weight→ dx
                                            └─────── · x, added up→ dweight

The products are those of a head (ops/head.py), in the dtype of `x` or in FP8. One kernel computes loss and gradient
between them: it reads a row of logits once, keeps it on the multiprocessor, and overwrites it with the gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.ids import as_ids, check_ids, is_token
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.shards import TensorParallel, current_amax_axes, parts_of_batch, sum_over_batch
from jax_fp8.kernels.cross_entropy import cross_entropy_gradient, nan_unless
from jax_fp8.kernels.vma import match_vma
from jax_fp8.ops.head import Head, check_head, finished_logits, make_head, unfinished_gradient

# Each chunk reads and writes the whole gradient of the weight, so chunks are large; but its logits are in memory:
# 412 MB in bfloat16 for a vocabulary of 50,304.
CHUNK_TOKENS = 4096
MAX_CHUNKS = 16


def linear_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    mask: jax.Array | None = None,
    mask_total: jax.Array | None = None,
    z_loss: float = 0.0,
    chunks: int | None = None,
    recipe: Recipe | None = None,
    tensor: TensorParallel | None = None,
    divisor: float = 1.0,
    cap: float | None = None,
) -> jax.Array:
    """The mean cross-entropy of the labels under `softmax(x · weightᵀ)`, in nats.

    Args:
      x: (batch, seq, hidden); its dtype is that of the products and of the logits, all else is float32.
      weight: (vocab, hidden), in the params' dtype; its gradient is added up in float32.
      labels: int (batch, seq), of any integer dtype. One that counts and is not in [0, vocab) makes the loss NaN:
        it would be another token's otherwise.
      mask: (batch, seq), bool or weights that are not negative: which tokens count, and how much; None is all alike.
        Where it is 0 everywhere, the loss is 0. A negative weight makes the loss NaN.
      mask_total: f32 (batch,), what the weighted sum of all tokens is divided by, the same number beside each row;
        None: the sum of the mask. For a part of a batch whose parts are averaged afterwards, it is the sum over the
        whole batch, divided by the number of parts.
      z_loss: keeps the normalizer of the softmax near 1.
      chunks: parts of the sequence, a divisor of it; None picks parts of about 4,096 tokens, at most 16 of them.
      recipe: CurrentScaling() or BlockScaling() computes the head in FP8; None in the dtype of `x`.
      tensor: in a step on shards, the axis that splits the vocabulary of `weight`, or None. Labels and mask are those
        of all tokens; with sequence parallelism `x` is this device's part of the rows.
      divisor, cap: of the logits; see `finished_logits`.

    Returns:
      f32[].
    """
    leading = tensor.all_rows(x.shape[:2]) if tensor is not None else x.shape[:2]
    if x.ndim != 3 or weight.ndim != 2 or x.shape[-1] != weight.shape[-1] or labels.shape != leading:
        raise ValueError(
            "linear_cross_entropy needs x (batch, seq, hidden), weight (vocab, hidden) and labels (batch, seq), "
            f"got {x.shape}, {weight.shape} and {labels.shape}; reshape them"
        )
    check_ids("labels", labels)
    if mask is not None and mask.shape != labels.shape:
        raise ValueError(f"mask must have the shape of labels {labels.shape}, got {mask.shape}")
    if tensor is not None and tensor.sequence:  # own rows beside the labels of all: blocks of flattened tokens
        x = x.reshape(1, -1, x.shape[-1])
    seq, vocab = x.shape[1], weight.shape[0] * (tensor.size if tensor is not None else 1)
    chunks = _number_of_chunks(labels.size, seq) if chunks is None else chunks
    if chunks < 1 or seq % chunks:
        raise ValueError(f"chunks must divide the sequence, got {chunks=} and a sequence of {seq}")
    check_head(labels.size // chunks, weight.shape[0], weight.shape[1], recipe)
    with jax.named_scope("cross_entropy"):
        of_tokens = _labels_and_shares(labels, mask, vocab, mask_total)
        static = _Static(chunks, z_loss, recipe, tensor, current_amax_axes(), divisor, cap)
        return _loss(static, *match_vma(x, weight, *of_tokens))


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    mask: jax.Array | None = None,
    mask_total: jax.Array | None = None,
    z_loss: float = 0.0,
) -> jax.Array:
    """The same loss of logits (batch, seq, vocab) that are there already."""
    check_ids("labels", labels)
    of_tokens = _labels_and_shares(labels, mask, logits.shape[-1], mask_total)
    return _loss_of(logits.astype(jnp.float32), *of_tokens, z_loss)[0]


def _labels_and_shares(
    labels: jax.Array, mask: jax.Array | None, vocab: int, mask_total: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Labels in [0, vocab), and the weight of each in the mean, f32 (batch, seq); NaN where a label that counts is not
    in [0, vocab).

    In a step on shards the loss is the mean over the losses of all parts of the batch. All tokens count alike in it if
    each has its weight in a mean over all tokens, times the number of parts.
    """
    weights = jnp.ones(labels.shape, jnp.float32) if mask is None else mask.astype(jnp.float32)
    total = sum_over_batch(jnp.sum(weights)) / parts_of_batch() if mask_total is None else mask_total[:, None]
    shares = weights / jnp.where(total > 0, total, 1)
    labels = as_ids(labels)
    known = is_token(labels, vocab)
    return jnp.where(known, labels, 0), nan_unless((known & (weights > 0)) | (weights == 0), shares)


@dataclass(frozen=True)
class _Static:
    chunks: int
    z_loss: float
    recipe: Recipe | None
    tensor: TensorParallel | None
    amax_axes: tuple[str, ...]
    divisor: float
    cap: float | None

    def head(self, x: jax.Array, weight: jax.Array) -> Head:
        return make_head(x, weight, self.recipe, self.tensor, self.amax_axes)

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        return () if self.tensor is None else (self.tensor.axis,)

    def split(self, x: jax.Array, *of_tokens: jax.Array) -> Iterator[tuple[jax.Array, ...]]:
        """Chunks of (batch, seq, ...) along the sequence, so that a sharded batch stays where it is. With sequence
        parallelism a chunk of own rows comes with the labels of all rows that are gathered with it.
        """
        if self.tensor is not None and self.tensor.sequence:
            devices = self.tensor.size
            blocks = (jnp.split(array.reshape(devices, -1), self.chunks, axis=1) for array in of_tokens)
            parts = ([block.reshape(1, -1) for block in array] for array in blocks)
        else:
            parts = (jnp.split(array, self.chunks, axis=1) for array in of_tokens)
        return zip(jnp.split(x, self.chunks, axis=1), *parts, strict=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static: _Static, x: jax.Array, weight: jax.Array, labels: jax.Array, shares: jax.Array) -> jax.Array:
    head, total = static.head(x, weight), jnp.float32(0)
    for x_part, labels_part, shares_part in static.split(x, labels, shares):
        logits = finished_logits(head.logits(head.operand(x_part)), static.divisor, static.cap).astype(jnp.float32)
        if static.vocab_axes:
            _, loss, _ = cross_entropy_gradient(logits, labels_part, shares_part, static.z_loss, static.vocab_axes)
            total = total + jnp.sum(loss)
        else:
            total = total + _loss_of(logits, labels_part, shares_part, static.z_loss)[0]
    return total


def _forward(static: _Static, x: jax.Array, weight: jax.Array, labels: jax.Array, shares: jax.Array):
    head, total, z_loss = static.head(x, weight), jnp.float32(0), static.z_loss
    dx, dweight = [], None
    for x_part, labels_part, shares_part in static.split(x, labels, shares):
        if dx:  # one chunk after the other, or the compiler might hold the logits of several
            x_part, dx[-1] = lax.optimization_barrier((x_part, dx[-1]))
        operand = head.operand(x_part)
        of_tokens = labels_part, shares_part
        logits = head.logits(operand)
        finished = finished_logits(logits, static.divisor, static.cap)
        dlogits, loss, lse = cross_entropy_gradient(finished, *of_tokens, z_loss, static.vocab_axes)
        dlogits = unfinished_gradient(dlogits, logits, static.divisor, static.cap)
        bound = jnp.max(shares_part * (1 + 2 * z_loss * jnp.abs(lse))) / static.divisor  # of |dlogits|
        part, dweight = head.gradients(dlogits, operand, dweight, bound)
        dx.append(part)
        total = total + jnp.sum(loss)
    sharding = jax.typeof(weight).sharding
    dweight = dweight if sharding.mesh.empty else jax.reshard(dweight, sharding)
    return total, (jnp.concatenate(dx, axis=1), dweight, jnp.zeros((0,), weight.dtype))


def _backward(static: _Static, kept: tuple, dloss: jax.Array):
    dx, dweight, like = kept
    return (dloss * dx.astype(jnp.float32)).astype(dx.dtype), (dloss * dweight).astype(like.dtype), None, None


_loss.defvjp(_forward, _backward)


def _loss_of(logits: jax.Array, labels: jax.Array, shares: jax.Array, z_loss: float) -> tuple[jax.Array, jax.Array]:
    """The loss f32[], and lse (batch, seq, 1)."""
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    is_label = labels[..., None] == lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    chosen = jnp.sum(jnp.where(is_label, logits, 0), axis=-1, keepdims=True)  # also where an axis splits the vocabulary
    return jnp.sum((lse - chosen + z_loss * jnp.square(lse)) * shares[..., None]), lse


def _number_of_chunks(tokens: int, seq: int) -> int:
    wanted = min(MAX_CHUNKS, max(1, tokens // CHUNK_TOKENS))
    return next(chunks for chunks in range(wanted, 0, -1) if seq % chunks == 0)
