"""The loss of a language model: the mean cross-entropy of next tokens; for a GPT also by its layers.

variables, batch ─Reading→ inputs, labels, mask ─the model→ loss of each next token ─→ mean over learned tokens
"""

from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from jax_fp8.core.checks import check_flags
from jax_fp8.core.layered_loss import LayeredLoss, LayersByKind, WholeBatchLoss
from jax_fp8.core.types import Batch, PyTree, Variables
from jax_fp8.models.batch import Reading, counted
from jax_fp8.models.checks import check_is_tokens_alone, check_loss_settings, check_runs_by_layers, check_streams
from jax_fp8.models.gpt import GPT
from jax_fp8.models.remat import Remat
from jax_fp8.nn.gemm import shared_fields
from jax_fp8.nn.moe import apply_with_losses
from jax_fp8.ops.cross_entropy import cross_entropy


class _Embedding(GPT):
    """The embedding, before the layers."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self._embed(self._table("embedding"), tokens)


class _Layer(GPT):
    """One layer, under its name."""

    @nn.compact
    def __call__(self, x: jax.Array, index: int) -> jax.Array:
        return self._layer(index, alone=True)(x)


class _Head(GPT):
    """Norm, head and loss, after the layers."""

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        labels: jax.Array,
        *,
        mask: jax.Array | None,
        mask_total: jax.Array | None,
        z_loss: float,
    ) -> jax.Array:
        embedding = self._table("embedding") if self.config.tie_embeddings else None
        return self._head(embedding, x, labels, mask, mask_total, z_loss)


def _layered(
    model: GPT,
    read: Callable[[Batch], Reading],
    z_loss: float,
    loss_fn: Callable,
    deterministic: bool,
    count: Callable[[Batch], Batch],
) -> LayeredLoss:
    """The loss of a GPT by its layers; `loss_fn` is the same loss in one."""
    first, layer, last = (piece(**shared_fields(model, GPT)) for piece in (_Embedding, _Layer, _Head))
    names = tuple(f"layer_{index}" for index in range(model.config.num_layers))
    remat = Remat.parse(model.remat, model.config.num_layers)
    remats = {name: remat.kind_for(index) for index, name in enumerate(names)}
    kinds = {  # in nothing else do layers differ
        name: (remats[name], *model.config.layer_fields(index).items()) for index, name in enumerate(names)
    }
    on_host = tuple(name for name, kind in remats.items() if kind == "offload")

    def apply_first(variables: Variables, batch: Batch) -> PyTree:
        reading = read(batch)
        check_runs_by_layers(model.config, reading.segment_ids, reading.lengths, deterministic)
        return first.apply(variables, reading.tokens)

    def apply_layer(variables: Variables, x: jax.Array, name: str) -> PyTree:
        return layer.apply(variables, x, names.index(name))

    def apply_last(variables: Variables, x: jax.Array, batch: Batch) -> PyTree:
        reading = read(batch)
        mask, mask_total = reading.mask, reading.mask_total
        return last.apply(variables, x, reading.labels, mask=mask, mask_total=mask_total, z_loss=z_loss)

    by_kind = LayersByKind(apply_layer, kinds.__getitem__)
    return LayeredLoss(names, apply_first, by_kind, apply_last, loss_fn, on_host, count)


def next_token_loss(
    model: nn.Module, *, ignore_label: int | None = None, z_loss: float = 0.0, deterministic: bool = False
) -> LayeredLoss | WholeBatchLoss:
    """Make the loss of a language model: the mean cross-entropy of each next token, in nats, float32.

    It is called as `loss_fn(variables, batch)`, for tokens (batch, seq + 1), integers of any dtype.

    A batch is its tokens, or, for a `GPT`, one of two dicts. `{"tokens": ..., "segment_ids": ...}`, both (batch, seq +
    1), has documents packed into sequences, each with its number. Documents do not see each other, and no token has the
    first token of the next document as its label. The number 0 is padding, which does not count. `{"tokens": ...,
    "lengths": ...}`, lengths int (batch,), has the number of tokens of each row before its padding.

    Each of these, or tokens alone, may mark the learned tokens, by one number for each token. `"loss_mask"` is the
    weight of the token; 0 or False: the model reads the token and does not learn it. `"labels"` is the token itself, or
    `ignore_label` where it is not learned. Neither is shifted: the number at a token is about that token. The mean is
    over the learned tokens of the whole batch, also where a step splits it into microbatches or over devices. But
    `accumulate_step` sees only its microbatch, and a function around this loss must pass its `whole_batch` on: see
    `WholeBatchLoss`.

    An input or a label outside of the vocabulary makes the loss NaN. Behind the last learned token of a row or document
    nothing is read, so any number may stand there.

    With experts, the losses of their routers are part of the loss: everything that the model has sown into the
    collection "losses".

    Args:
      model: a `GPT`, whose loss never holds the logits of a whole batch, or another module that maps tokens to logits.
      ignore_label: a next token that does not count, such as padding; with "labels" None is -100. It matters to labels
        alone: as an input it is read like any other number.
      z_loss: adds `z_loss lse²`; see `linear_cross_entropy`.
      deterministic: True turns off the dropout of a `GPT`, for evaluation. Otherwise a loss with a `dropout_rate` is
        called as `loss_fn(variables, batch, rngs={"dropout": key})`: see `make_train_step`.

    Returns:
      A function that returns the loss, f32[]. That of a `GPT` is a `LayeredLoss`, which pipelines need; that of another
      module is a `WholeBatchLoss`.

    Raises:
      ValueError: if `model` is not a module, or a setting has another type. The function raises it where a batch is not
        as described, and where a model with dropout gets no key.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> config = fp8.GPTConfig(vocab_size=32, num_layers=1, num_heads=1, hidden_size=16, max_seq_len=8)
      >>> model, tokens = fp8.GPT(config), jnp.ones((2, 9), jnp.int32)
      >>> variables = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])
      >>> loss = jax.jit(fp8.next_token_loss(model))(variables, tokens)
      >>> loss.shape, loss.dtype.name, bool(loss > 0)
      ((), 'float32', True)
    """
    check_loss_settings(model, ignore_label, z_loss)
    check_flags(deterministic=deterministic)

    def read(batch: Batch) -> Reading:
        return Reading.from_batch(batch, ignore_label, model.config.vocab_size if isinstance(model, GPT) else None)

    def count(batch: Batch) -> Batch:
        return counted(batch, ignore_label)

    def gpt_loss(variables: Variables, batch: Batch, rngs: Mapping[str, jax.Array] | None = None) -> jax.Array:
        assert isinstance(model, GPT)
        check_streams(model.config, rngs, deterministic)
        reading = read(batch)
        loss, router_losses = apply_with_losses(
            model,
            variables,
            reading.tokens,
            reading.labels,
            mask=reading.mask,
            mask_total=reading.mask_total,
            z_loss=z_loss,
            segment_ids=reading.segment_ids,
            lengths=reading.lengths,
            deterministic=deterministic,
            rngs=rngs,
        )
        return jnp.asarray(loss) + router_losses

    def logits_loss(variables: Variables, batch: Batch, rngs: Mapping[str, jax.Array] | None = None) -> jax.Array:
        reading = read(batch)
        check_is_tokens_alone(reading.segment_ids, reading.lengths)
        logits, sown_losses = apply_with_losses(model, variables, reading.tokens, rngs=rngs)
        logits = jnp.asarray(logits)
        labels = reading.labels_in(logits.shape[-1])
        mask, mask_total = reading.mask, reading.mask_total
        return cross_entropy(logits, labels, mask=mask, mask_total=mask_total, z_loss=z_loss) + sown_losses

    if isinstance(model, GPT):
        return _layered(model, read, z_loss, gpt_loss, deterministic, count)
    return WholeBatchLoss(logits_loss, count)
