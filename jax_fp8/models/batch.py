"""What a model reads of a batch of tokens, and what it is to find: each token's next one, where there is one."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8.models.checks import check_batch


@dataclass(frozen=True)
class Reading:
    """What a model reads of a batch, each (batch, seq) but for `lengths` (batch,), and what it is to find."""

    tokens: jax.Array
    labels: jax.Array
    mask: jax.Array | None
    segment_ids: jax.Array | None
    lengths: jax.Array | None

    @classmethod
    def of(cls, batch: Any, ignore_label: int | None) -> "Reading":
        tokens, segment_ids, lengths = check_batch(batch)
        inputs, labels, mask = tokens[:, :-1], tokens[:, 1:], None
        if ignore_label is not None:  # what is ignored need not be a token
            mask, inputs = labels != ignore_label, jnp.where(inputs == ignore_label, 0, inputs)
        is_next = None
        if segment_ids is not None:
            segment_ids, of_label = segment_ids[:, :-1], segment_ids[:, 1:]
            is_next = (segment_ids == of_label) & (of_label != 0)
        if lengths is not None:
            is_next = jnp.arange(1, tokens.shape[1])[None] < lengths[:, None]
            lengths = jnp.minimum(lengths, tokens.shape[1] - 1)
        if is_next is not None:
            mask = is_next if mask is None else mask & is_next
        return cls(inputs, labels, mask, segment_ids, lengths)
