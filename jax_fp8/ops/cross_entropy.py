"""The head and its loss as one op: cross-entropy of `x · weightᵀ` whose logits exist a chunk at a time.

    logits = x · weightᵀ          lse = log sum exp logits
    loss = mean of  lse - logits[label] + z_loss lse²        (https://arxiv.org/abs/2204.02311, section 5, for z_loss)
    dlogits = softmax(logits) (1 + 2 z_loss lse) - onehot(label)

The logits of a batch are the largest array of a training step, and their gradient is as large. The gradient of a loss
that is a mean is known up to a factor as soon as the logits are, so the forward pass computes that of `x` and of
`weight` chunk by chunk, and keeps these instead.

    chunk of x ─· weightᵀ→ logits → loss, dlogits ─· weight→ dx
                                            └─────── · x, added up→ dweight

The products are those of a head (ops/head.py), in the dtype of `x` or in FP8. What lies between them is one kernel: it
reads a row of logits once, keeps it on the multiprocessor, and writes the gradient over it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.recipe import Recipe
from jax_fp8.kernels.cross_entropy import cross_entropy_gradient, nan_unless
from jax_fp8.kernels.varying import alike
from jax_fp8.ops.head import check_head, make_head

# A chunk reads and writes the gradient of the weight, and holds its logits:
# 412 MB in bfloat16 where the vocabulary is 50,304.
CHUNK_TOKENS = 4096
MAX_CHUNKS = 16


def linear_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    mask: jax.Array | None = None,
    z_loss: float = 0.0,
    chunks: int | None = None,
    recipe: Recipe | None = None,
) -> jax.Array:
    """The mean cross-entropy of the labels under `softmax(x · weightᵀ)`, in nats.

    Args:
      x: (batch, seq, hidden); its dtype is that of the products and of the logits, all else is float32.
      weight: (vocab, hidden), in the params' dtype; its gradient is added up in float32.
      labels: int (batch, seq). One that counts and is not in [0, vocab) makes the loss NaN:
        it would be another token's otherwise.
      mask: (batch, seq), bool or weights that are not negative: which tokens count, and how much; None is all alike.
        Where it is 0 everywhere, the loss is 0.
      z_loss: keeps the normalizer of the softmax near 1.
      chunks: parts of the sequence, a divisor of it; None picks parts of about 4,096 tokens, at most 16 of them.
      recipe: CurrentScaling() computes the head in FP8; None in the dtype of `x`.

    Returns:
      f32[].
    """
    if x.ndim != 3 or weight.ndim != 2 or x.shape[-1] != weight.shape[-1] or labels.shape != x.shape[:2]:
        raise ValueError(
            "linear_cross_entropy needs x (batch, seq, hidden), weight (vocab, hidden) and labels (batch, seq), "
            f"got {x.shape}, {weight.shape} and {labels.shape}; reshape them"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels must be integers, got {labels.dtype}; pass token numbers")
    if mask is not None and mask.shape != labels.shape:
        raise ValueError(f"mask must have the shape of labels {labels.shape}, got {mask.shape}")
    seq = x.shape[1]
    chunks = _number_of_chunks(labels.size, seq) if chunks is None else chunks
    if chunks < 1 or seq % chunks:
        raise ValueError(f"chunks must divide the sequence, got {chunks=} and a sequence of {seq}")
    check_head(labels.size // chunks, weight.shape[0], weight.shape[1], recipe)
    with jax.named_scope("cross_entropy"):
        of_tokens = _labels_and_shares(labels, mask, weight.shape[0])
        return _loss(chunks, z_loss, recipe, *alike(x, weight, *of_tokens))


def cross_entropy(
    logits: jax.Array, labels: jax.Array, *, mask: jax.Array | None = None, z_loss: float = 0.0
) -> jax.Array:
    """The same loss of logits (batch, seq, vocab) that are there already."""
    return _loss_of(logits.astype(jnp.float32), *_labels_and_shares(labels, mask, logits.shape[-1]), z_loss)[0]


def _labels_and_shares(labels, mask, vocab) -> tuple[jax.Array, jax.Array]:
    """Labels that are tokens, and what each contributes to the mean, f32 (batch, seq);
    NaN where one that counts is no token.
    """
    weights = jnp.ones(labels.shape, jnp.float32) if mask is None else mask.astype(jnp.float32)
    shares = weights / jnp.maximum(jnp.sum(weights), np.float32(1e-30))
    is_token = (labels >= 0) & (labels < vocab)
    return jnp.where(is_token, labels, 0), nan_unless(is_token | (weights == 0), shares)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _loss(chunks, z_loss, recipe, x, weight, labels, shares):
    head, total = make_head(x, weight, recipe), jnp.float32(0)
    for x_part, labels_part, shares_part in _split(chunks, x, labels, shares):
        total = total + _loss_of(_logits(head, head.operand(x_part)), labels_part, shares_part, z_loss)[0]
    return total


def _forward(chunks, z_loss, recipe, x, weight, labels, shares):
    head, total = make_head(x, weight, recipe), jnp.float32(0)
    dx, dweight = [], None
    for x_part, labels_part, shares_part in _split(chunks, x, labels, shares):
        if dx:  # one chunk after the other, or the compiler might hold the logits of several
            x_part, dx[-1] = lax.optimization_barrier((x_part, dx[-1]))
        operand = head.operand(x_part)
        dlogits, loss, lse = cross_entropy_gradient(head.logits(operand), labels_part, shares_part, z_loss)
        bound = jnp.max(shares_part * (1 + 2 * z_loss * jnp.abs(lse)))  # of |dlogits|
        part, dweight = head.gradients(dlogits, operand, dweight, bound)
        dx.append(part)
        total = total + jnp.sum(loss)
    sharding = jax.typeof(weight).sharding
    dweight = dweight if sharding.mesh.empty else jax.reshard(dweight, sharding)
    return total, (jnp.concatenate(dx, axis=1), dweight, jnp.zeros((0,), weight.dtype))


def _backward(chunks, z_loss, recipe, kept, dloss):
    dx, dweight, like = kept
    return (dloss * dx.astype(jnp.float32)).astype(dx.dtype), (dloss * dweight).astype(like.dtype), None, None


_loss.defvjp(_forward, _backward)


def _logits(head, operand) -> jax.Array:
    """Rounded to the dtype of `x`, as a head that returns logits would, and float32 from there on."""
    return head.logits(operand).astype(jnp.float32)


def _loss_of(logits, labels, shares, z_loss):
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    return jnp.sum((lse - chosen + z_loss * jnp.square(lse)) * shares[..., None]), lse


def _split(chunks, *arrays):
    """The parts of (batch, seq, ...) along the sequence, so that a sharded batch stays where it is."""
    return zip(*(jnp.split(array, chunks, axis=1) for array in arrays), strict=True)


def _number_of_chunks(tokens, seq) -> int:
    wanted = min(MAX_CHUNKS, max(1, tokens // CHUNK_TOKENS))
    return next(chunks for chunks in range(wanted, 0, -1) if seq % chunks == 0)
