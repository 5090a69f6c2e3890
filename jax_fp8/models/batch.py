"""What a model reads of a batch of tokens, and what it is to find: each token's next one, where there is one to learn.

    tokens, and which of them belong together, and which are learned → inputs, labels, weights (batch, seq)

The mean is over the learned tokens of a whole batch. So a batch that is split into microbatches says first how many
there are: `counted` writes the number beside each row, and a part of the batch divides by its share of it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.ids import as_ids, is_token
from jax_fp8.kernels.explicit import zeros_like
from jax_fp8.models.checks import check_batch

IGNORED = -100  # among "labels", where a loss has no ignore_label: as in the data of other libraries


@partial(jax.tree_util.register_dataclass, data_fields=["batch", "learned"], meta_fields=["rows"])
@dataclass(frozen=True)
class CountedBatch:
    """A batch, or a part of its rows, that knows how much the whole one has to learn.

    Args:
      batch: as `next_token_loss` takes it.
      learned: f32[rows], beside each row the sum of the weights of all tokens of the whole batch.
      rows: of the whole batch; static.
    """

    batch: Any
    learned: jax.Array
    rows: int

    @property
    def total(self) -> jax.Array:
        """f32[rows]: what the sum over a part is divided by, if parts are averaged afterwards."""
        return self.learned * (self.learned.shape[0] / self.rows)


@dataclass(frozen=True)
class Reading:
    """What a model reads of a batch, each (batch, seq) but for `lengths` (batch,), and what it is to find.

    `mask` is bool, or f32 where the batch has weights; None: all tokens count alike. `mask_total` f32 (batch,) is what
    their sum is divided by, None: by that of the mask.
    """

    tokens: jax.Array
    labels: jax.Array
    mask: jax.Array | None
    mask_total: jax.Array | None
    segment_ids: jax.Array | None
    lengths: jax.Array | None

    @classmethod
    def of(cls, batch: Any, ignore_label: int | None, vocab: int | None = None) -> "Reading":
        """Of tokens in a vocabulary of this size; None: of a size that only the model knows."""
        total = None
        if isinstance(batch, CountedBatch):
            batch, total = batch.batch, batch.total
        told = _told(batch)
        tokens, segment_ids, lengths = told["tokens"], told.get("segment_ids"), told.get("lengths")
        mask, inputs, labels = _learned(told, ignore_label), tokens[:, :-1], told.get("labels", tokens)[:, 1:]
        if segment_ids is not None:
            segment_ids = segment_ids[:, :-1]
        if lengths is not None:
            labels = jnp.where(lengths[:, None] < 0, -1, labels)  # a length that is none: the loss shall be NaN
            lengths = jnp.minimum(lengths, tokens.shape[1] - 1)
        if mask is not None:
            wrong = inputs < 0 if vocab is None else ~is_token(inputs, vocab)
            if vocab is None and ignore_label is not None:
                wrong |= inputs == ignore_label
            inputs = jnp.where(wrong & _behind_what_is_learned(mask, segment_ids), 0, inputs)
        return cls(inputs, labels, mask, total, segment_ids, lengths)

    def options(self) -> dict[str, Any]:
        """What of this a cross-entropy is told by name."""
        return {"mask": self.mask, "mask_total": self.mask_total}

    def labels_in(self, vocab: int) -> jax.Array:
        """The labels, for a model of which only the logits say how large its vocabulary is: -1 in rows where it reads
        what is no token, so that their loss is NaN.
        """
        is_right = jnp.all(is_token(self.tokens, vocab), axis=1, keepdims=True)
        return jnp.where(is_right, self.labels, -1)


def counted(batch: Any, ignore_label: int | None) -> Any:
    """A whole batch, before it is split, with the number of its learned tokens; as it is where all of them are."""
    mask = _learned(_told(batch), ignore_label)
    if mask is None:
        return batch
    total = jnp.sum(mask, dtype=jnp.float32)
    return CountedBatch(batch, zeros_like(mask[:, 0], jnp.float32) + total, mask.shape[0])


def without_padding(tokens: jax.Array, vocab: int, segment_ids: Any, lengths: Any) -> jax.Array:
    """Tokens (batch, seq) for a model to read: padding, which may be anything, has some token where it has none."""
    if segment_ids is None and lengths is None:
        return tokens
    is_padding = segment_ids == 0 if lengths is None else jnp.arange(tokens.shape[1])[None] >= lengths[:, None]
    return jnp.where(is_padding & ~is_token(tokens, vocab), 0, tokens)


def _told(batch) -> dict[str, Any]:
    """What a batch says, by name; int32 where it may be compared with what its own dtype does not hold."""
    told = check_batch(batch)
    return {name: as_ids(array) if name in ("tokens", "labels", "lengths") else array for name, array in told.items()}


def _learned(told, ignore_label) -> jax.Array | None:
    """Which next tokens are learned, bool (batch, seq), or how much, f32; None: all alike."""
    tokens, found = told["tokens"], None
    if "labels" in told:
        found = told["labels"][:, 1:] != (IGNORED if ignore_label is None else ignore_label)
    elif ignore_label is not None:
        found = tokens[:, 1:] != ignore_label
    if "segment_ids" in told:
        before, after = told["segment_ids"][:, :-1], told["segment_ids"][:, 1:]
        found = _both(found, (before == after) & (after != 0))
    if "lengths" in told:
        lengths = told["lengths"][:, None]
        found = _both(found, (jnp.arange(1, tokens.shape[1])[None] < lengths) | (lengths < 0))
    if "loss_mask" not in told:
        return found
    weights = told["loss_mask"][:, 1:]
    if weights.dtype == bool:
        return _both(found, weights)
    weights = weights.astype(jnp.float32)
    return weights if found is None else jnp.where(found, weights, 0)


def _both(one, other) -> jax.Array:
    return other if one is None else one & other


def _behind_what_is_learned(mask, segment_ids) -> jax.Array:
    """Which inputs no learned next token is predicted from, bool (batch, seq): those behind the last one of their row,
    or of their document.
    """
    seq = mask.shape[1]
    numbers = lax.broadcasted_iota(jnp.int32, mask.shape, 1)
    if segment_ids is None:
        return numbers > jnp.max(jnp.where(mask.astype(bool), numbers, -1), axis=1, keepdims=True)
    is_last = jnp.concatenate([segment_ids[:, :-1] != segment_ids[:, 1:], jnp.ones_like(mask[:, :1], bool)], axis=1)
    next_learned, last = (
        lax.cummin(jnp.where(here, numbers, seq), axis=1, reverse=True) for here in (mask.astype(bool), is_last)
    )
    return next_learned > last
