"""The loss of a language model: the mean cross-entropy of next tokens, of a GPT in one and by its layers.

variables, batch ─Reading→ inputs, labels, weights ─the model→ loss of each next token ─→ mean of those learned
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jax_fp8.core.checks import check_flags
from jax_fp8.core.layered_loss import LayeredLoss, LayersByKind, WholeBatchLoss
from jax_fp8.models.batch import Reading, counted
from jax_fp8.models.checks import (
    check_has_no_experts,
    check_is_read_alone,
    check_is_read_as_tokens,
    check_loss_settings,
    check_streams,
    what_drops,
)
from jax_fp8.models.gpt import GPT
from jax_fp8.models.remat import Remat
from jax_fp8.nn.gemm import shared_fields
from jax_fp8.nn.moe import apply_with_losses
from jax_fp8.ops.cross_entropy import cross_entropy


class _Embedding(GPT):
    """What comes before the layers."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self._embed(self._table("embedding"), tokens)


class _Layer(GPT):
    """One layer, under its name."""

    @nn.compact
    def __call__(self, x: jax.Array, index: int) -> jax.Array:
        return self._layer(index, alone=True)(x)


class _Head(GPT):
    """What comes after the layers: the loss."""

    @nn.compact
    def __call__(self, x: jax.Array, labels: jax.Array, **options: Any) -> jax.Array:
        embedding = self._table("embedding") if self.config.tie_embeddings else None
        return self._head(embedding, x, labels, **options)


def _layered(
    model: GPT, read: Callable[[Any], Reading], z_loss: float, loss_fn: Callable, deterministic: bool, count: Callable
) -> LayeredLoss:
    """The loss of a GPT by its layers."""
    first, layer, last = (piece(**shared_fields(model, GPT)) for piece in (_Embedding, _Layer, _Head))
    names = tuple(f"layer_{index}" for index in range(model.config.num_layers))
    remat = Remat.parse(model.remat, model.config.num_layers)
    remats = {name: remat.of_layer(index) for index, name in enumerate(names)}  # in nothing else do layers differ
    on_host = tuple(name for name, kind in remats.items() if kind == "offload")

    def embed_of(variables, batch):
        reading = read(batch)
        check_is_read_alone(reading.segment_ids, reading.lengths, "" if deterministic else what_drops(model.config))
        check_has_no_experts(model.config)
        return first.apply(variables, reading.tokens)

    def loss_of(variables, x, batch):
        reading = read(batch)
        return last.apply(variables, x, reading.labels, **reading.options(), z_loss=z_loss)

    return LayeredLoss(
        names,
        embed_of,
        LayersByKind(lambda variables, x, name: layer.apply(variables, x, names.index(name)), remats.__getitem__),
        loss_of,
        loss_fn,
        on_host,
        count,
    )


def next_token_loss(
    model: nn.Module, *, ignore_label: int | None = None, z_loss: float = 0.0, deterministic: bool = False
) -> LayeredLoss | WholeBatchLoss:
    """`loss_fn(variables, batch)` for tokens (batch, seq + 1), integers of any dtype:
    the mean cross-entropy of each next token, in nats, float32. That of a `GPT` is a `LayeredLoss`, as pipelines want.

    A batch is its tokens, or for a `GPT` `{"tokens": ..., "segment_ids": ...}`, both (batch, seq + 1): documents that
    are packed into sequences, each with its number. None sees another, nor is its first token anybody's next. 0 is the
    number of padding, which does not count. Or it is `{"tokens": ..., "lengths": ...}`, lengths int (batch,): how many
    tokens of each row come before its padding.

    Each of these, or tokens alone, may say what is learned, by one number for each token: `"loss_mask"`, 0 or False
    where a token is read and not learned, else its weight; or `"labels"`, the token, or `ignore_label` where it is not
    learned. Neither is shifted: what stands at a token is about that token. The mean is over the learned tokens of the
    whole batch, also where a step splits it into microbatches or over devices; `accumulate_step` knows no more than its
    microbatch, and a function around this loss must hand on its `whole_batch`: see `WholeBatchLoss`.

    What is read and is no token of the vocabulary makes the loss NaN, as do labels that are none. Behind the last
    learned token of a row or document nothing is read, and anything may stand there.

    With experts, what their routers add is part of the loss: whatever the model has sown into the collection "losses".

    Args:
      model: a `GPT`, whose loss needs no logits of a whole batch, or another module that maps tokens to logits.
      ignore_label: a next token that does not count, such as padding; with "labels" None is -100. It is about what is
        learned alone: as an input it is read like any other number.
      z_loss: adds `z_loss lse²`; see `linear_cross_entropy`.
      deterministic: True drops nothing, whatever the config of a `GPT` says, as for evaluation. With a `dropout_rate`
        the loss is `loss_fn(variables, batch, rngs={"dropout": key})` otherwise: see `make_train_step`.
    """
    check_loss_settings(model, ignore_label, z_loss)
    check_flags(deterministic=deterministic)

    def read(batch):
        return Reading.of(batch, ignore_label, model.config.vocab_size if isinstance(model, GPT) else None)

    def count(batch):
        return counted(batch, ignore_label)

    def loss_of_gpt(variables, batch, rngs=None):
        check_streams(model, rngs, deterministic)
        of = read(batch)
        options: Any = {"z_loss": z_loss, "segment_ids": of.segment_ids, "lengths": of.lengths, **of.options()}
        options |= {"deterministic": deterministic, "rngs": rngs}
        loss, added = apply_with_losses(model, variables, of.tokens, of.labels, **options)
        return jnp.asarray(loss) + added

    def loss_of_logits(variables, batch, rngs=None):
        of = read(batch)
        check_is_read_as_tokens(of)
        logits, added = apply_with_losses(model, variables, of.tokens, rngs=rngs)
        logits = jnp.asarray(logits)
        return cross_entropy(logits, of.labels_in(logits.shape[-1]), z_loss=z_loss, **of.options()) + added

    if isinstance(model, GPT):
        return _layered(model, read, z_loss, loss_of_gpt, deterministic, count)
    return WholeBatchLoss(loss_of_logits, count)
