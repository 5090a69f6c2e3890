"""From a batch of tokens to the inputs and labels of a language model: each token's label is the next token.

    tokens, with documents or lengths, with a loss mask or labels → inputs, labels, mask (batch, seq)

The loss is a mean over the learned tokens of a whole batch. So before a step splits a batch into microbatches,
`counted` writes the number of learned tokens beside each row. Each part then divides by its share of that number.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.ids import as_ids, is_token
from jax_fp8.core.types import Batch
from jax_fp8.kernels.explicit import zeros_like
from jax_fp8.models.checks import check_batch

IGNORED = -100  # among "labels", where a loss has no ignore_label; other libraries use this number, too


@partial(jax.tree_util.register_dataclass, data_fields=["batch", "learned"], meta_fields=["rows"])
@dataclass(frozen=True)
class CountedBatch:
    """A batch, or some of its rows, with the number of learned tokens in the whole batch.

    Args:
      batch: as `next_token_loss` takes it.
      learned: f32[rows], the same number in each row: the sum of the weights of all tokens of the whole batch.
      rows: of the whole batch; static.
    """

    batch: Batch
    learned: jax.Array
    rows: int

    @property
    def total(self) -> jax.Array:
        """f32[rows], the divisor for the losses of a part: the mean over all parts is then the mean of the batch."""
        return self.learned * (self.learned.shape[0] / self.rows)


@dataclass(frozen=True)
class Reading:
    """Inputs of a model and their labels, each (batch, seq), but for `lengths` (batch,).

    `mask` is bool, or f32 where the batch has weights; None: all tokens count alike. `mask_total` f32 (batch,) is the
    divisor for the sum of losses; None: the sum of the mask.
    """

    tokens: jax.Array
    labels: jax.Array
    mask: jax.Array | None
    mask_total: jax.Array | None
    segment_ids: jax.Array | None
    lengths: jax.Array | None

    @classmethod
    def from_batch(cls, batch: Batch, ignore_label: int | None, vocab: int | None = None) -> "Reading":
        """Read a batch. `vocab` is the size of the vocabulary; None where only the model knows it."""
        total = None
        if isinstance(batch, CountedBatch):
            batch, total = batch.batch, batch.total
        arrays = _arrays(batch)
        tokens, segment_ids, lengths = arrays["tokens"], arrays.get("segment_ids"), arrays.get("lengths")
        mask, inputs, labels = _learned(arrays, ignore_label), tokens[:, :-1], arrays.get("labels", tokens)[:, 1:]
        if segment_ids is not None:
            segment_ids = segment_ids[:, :-1]
        if lengths is not None:
            labels = jnp.where(lengths[:, None] < 0, -1, labels)  # a negative length makes the loss NaN
            lengths = jnp.minimum(lengths, tokens.shape[1] - 1)
        if mask is not None:
            wrong = inputs < 0 if vocab is None else ~is_token(inputs, vocab)
            if vocab is None and ignore_label is not None:
                wrong |= inputs == ignore_label
            inputs = jnp.where(wrong & _behind_learned_tokens(mask, segment_ids), 0, inputs)
        return cls(inputs, labels, mask, total, segment_ids, lengths)

    def labels_in(self, vocab: int) -> jax.Array:
        """The labels, once the logits have shown the size of the vocabulary. A row with an input that is no token gets
        labels of -1, so that its loss is NaN.
        """
        is_right = jnp.all(is_token(self.tokens, vocab), axis=1, keepdims=True)
        return jnp.where(is_right, self.labels, -1)


def counted(batch: Batch, ignore_label: int | None) -> Batch:
    """A whole batch with the number of its learned tokens, before it is split. A batch of which every token is learned
    comes back unchanged.
    """
    mask = _learned(_arrays(batch), ignore_label)
    if mask is None:
        return batch
    total = jnp.sum(mask, dtype=jnp.float32)
    return CountedBatch(batch, zeros_like(mask[:, 0], jnp.float32) + total, mask.shape[0])


def without_padding(
    tokens: jax.Array, vocab: int, segment_ids: jax.Array | None, lengths: jax.Array | None
) -> jax.Array:
    """Tokens (batch, seq) as a model reads them: a number in the padding that is no token becomes token 0."""
    if segment_ids is None and lengths is None:
        return tokens
    is_padding = segment_ids == 0 if lengths is None else jnp.arange(tokens.shape[1])[None] >= lengths[:, None]
    return jnp.where(is_padding & ~is_token(tokens, vocab), 0, tokens)


def _arrays(batch: Batch) -> dict[str, jax.Array]:
    """The arrays of a batch, by name. Those compared with other numbers become int32: -100 does not fit into uint16."""
    arrays = check_batch(batch)
    return {name: as_ids(array) if name in ("tokens", "labels", "lengths") else array for name, array in arrays.items()}


def _learned(arrays: dict[str, jax.Array], ignore_label: int | None) -> jax.Array | None:
    """Which next tokens are learned, bool (batch, seq), or with which weights, f32; None: all alike."""
    tokens, mask = arrays["tokens"], None
    if "labels" in arrays:
        mask = arrays["labels"][:, 1:] != (IGNORED if ignore_label is None else ignore_label)
    elif ignore_label is not None:
        mask = tokens[:, 1:] != ignore_label
    if "segment_ids" in arrays:
        before, after = arrays["segment_ids"][:, :-1], arrays["segment_ids"][:, 1:]
        mask = _both(mask, (before == after) & (after != 0))
    if "lengths" in arrays:
        lengths = arrays["lengths"][:, None]
        mask = _both(mask, (jnp.arange(1, tokens.shape[1])[None] < lengths) | (lengths < 0))
    if "loss_mask" not in arrays:
        return mask
    weights = arrays["loss_mask"][:, 1:]
    if weights.dtype == bool:
        return _both(mask, weights)
    weights = weights.astype(jnp.float32)
    return weights if mask is None else jnp.where(mask, weights, 0)


def _both(mask: jax.Array | None, other: jax.Array) -> jax.Array:
    return other if mask is None else mask & other


def _behind_learned_tokens(mask: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Inputs that no learned token depends on, bool (batch, seq): those behind the last learned token of their row, or
    of their document.
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
