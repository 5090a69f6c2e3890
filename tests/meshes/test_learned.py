"""The mean over the learned tokens of a whole batch: in microbatches, on devices and on stages it is that of NumPy.

Rows have very different numbers of learned tokens, some have none. So the mean of the parts' means is another.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import SHOWING, errors, gpt, gradients_of, significant, train

import jax_fp8 as fp8

ROWS, SEQ, VOCAB = 8, 16, 128
LEARNED = (16, 0, 1, 2, 0, 3, 9, 1)  # of each row, the last ones: what is before them is a prompt
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.uint8)
IS_LEARNED = np.arange(SEQ + 1) > SEQ - np.array(LEARNED)[:, None]
LABELS = np.where(IS_LEARNED, TOKENS.astype(np.int16), -100)
WEIGHTS = np.where(IS_LEARNED, np.random.default_rng(1).random((ROWS, SEQ + 1)) + 0.5, 0).astype(np.float32)
LENGTHS = np.array([17, 2, 1, 3, 0, 9, 17, 5], np.uint8)
IN_LENGTH = np.arange(SEQ + 1) < LENGTHS[:, None]
DOCUMENTS = np.where(IN_LENGTH, 200 + (np.arange(SEQ + 1) >= 5), 0).astype(np.uint8)  # two in a long row

BATCHES: dict[str, tuple[Any, np.ndarray]] = {  # and the weight of each token
    "loss_mask": ({"tokens": TOKENS, "loss_mask": WEIGHTS}, WEIGHTS),
    "labels": ({"tokens": TOKENS, "labels": LABELS}, IS_LEARNED),
    "lengths": ({"tokens": TOKENS, "lengths": LENGTHS}, IN_LENGTH),
    "lengths and loss_mask": ({"tokens": TOKENS, "lengths": LENGTHS, "loss_mask": WEIGHTS}, IN_LENGTH * WEIGHTS),
    "segment_ids and labels": (
        {"tokens": TOKENS, "segment_ids": DOCUMENTS, "labels": LABELS},
        IN_LENGTH & IS_LEARNED & (np.arange(SEQ + 1) != 5),
    ),
    "nothing": ({"tokens": TOKENS, "loss_mask": np.zeros(TOKENS.shape, bool)}, np.zeros(TOKENS.shape)),
}


class Other(nn.Module):
    """A model that is no GPT to the loss."""

    model: fp8.GPT

    def __call__(self, tokens):
        return self.model(tokens)


@dataclass(frozen=True)
class Way:
    batch: str
    microbatches: int = 1
    axes: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    is_other: bool = False


DRAWS = {"rngs": {"dropout": jax.random.key(0)}}
WAYS = {
    "one": Way("loss_mask"),
    "microbatches": Way("loss_mask", 4),
    "microbatches, labels, rngs": Way("labels", 4, options=DRAWS),
    "microbatches, lengths": Way("lengths", 4),
    "microbatches, documents": Way("segment_ids and labels", 4),
    "another model": Way("labels", 4, is_other=True),
    "data": Way("loss_mask", axes={"data": 4}),
    "data, microbatches": Way("lengths and loss_mask", 2, {"data": 4}),
    "pipe": Way("loss_mask", 4, {"pipe": 2}),
    "data, pipe": Way("labels", 2, {"data": 2, "pipe": 2}),
    "fsdp, tensor, sequence": Way("labels", 2, {"fsdp": 2, "tensor": 2}, {"sequence_parallel": True}),
    "nothing": Way("nothing", 4),
}


def model_of(is_other=False):
    model = gpt(None, dtype=jnp.float32, vocab_size=VOCAB, hidden_size=32, num_layers=2, max_seq_len=SEQ)
    return Other(model) if is_other else model


@functools.cache
def first_state(is_other):
    params = jax.jit(model_of().init)(jax.random.key(0), jnp.zeros((1, SEQ), jnp.int32))["params"]
    params = jax.tree.map(lambda p: 5 * p if p.ndim == 2 else p, params)  # so that tokens have very different losses
    return fp8.TrainState.create(variables={"params": {"model": params} if is_other else params}, tx=SHOWING)


@functools.cache
def expected(name):
    """The mean by its definition, its gradient, and what the losses of tokens are."""
    batch, weights = BATCHES[name]
    told = {key: jnp.asarray(batch[key])[:, :SEQ] for key in ("segment_ids",) if key in batch}
    if "lengths" in batch:
        told["lengths"] = jnp.minimum(batch["lengths"].astype(np.int32), SEQ)

    def losses(params):
        logits = model_of().apply({"params": params}, jnp.int32(TOKENS[:, :-1]), **told)
        log_probabilities = jax.nn.log_softmax(jnp.asarray(logits))
        return -jnp.take_along_axis(log_probabilities, jnp.int32(TOKENS[:, 1:, None]), -1)[..., 0]

    def mean(params):
        of_tokens = losses(params)
        return jnp.sum(of_tokens * weights[:, 1:]) / max(weights[:, 1:].sum(), 1), of_tokens

    (_, of_tokens), gradients = jax.jit(jax.value_and_grad(mean, has_aux=True))(first_state(False).params)
    return np.asarray(of_tokens, np.float64), gradients


def mean_of(of_tokens, weights):
    return (of_tokens * weights).sum() / max(weights.sum(), 1e-9)


@pytest.mark.versions
@pytest.mark.parametrize("name", WAYS)
def test_a_step_has_the_mean_of_the_whole_batch(name):
    way = WAYS[name]
    batch, weights = BATCHES[way.batch]
    of_tokens, gradients = expected(way.batch)
    loss_fn = fp8.next_token_loss(model_of(way.is_other))
    options: dict[str, Any] = {"axes": way.axes or None, "microbatches": way.microbatches, **way.options}
    (state,), (loss,) = train(loss_fn, first_state(way.is_other), batch, None, **options)
    of_params = gradients_of(state)["model"] if way.is_other else gradients_of(state)
    weights = np.asarray(weights[:, 1:], np.float64)
    assert loss == pytest.approx(mean_of(of_tokens, weights), rel=1e-5)
    if way.batch == "nothing":
        assert loss == 0 and not any(map(np.any, jax.tree.leaves(of_params)))
        return
    far = errors(significant(of_params), significant(gradients))
    assert max(far.values()) < 1e-4, far

    # Negative control: the mean of means, of microbatches (which are strided) or of devices.
    parts = [np.s_[i :: way.microbatches] for i in range(way.microbatches)]
    parts = parts if len(parts) > 1 else [np.s_[2 * i : 2 * i + 2] for i in range(4)]
    of_means = np.mean([mean_of(of_tokens[part], weights[part]) for part in parts])
    assert abs(of_means - loss) > 1e-2


def test_pieces_know_their_own_microbatch_alone():
    """As the documentation says: the mean of the means."""
    batch, weights = BATCHES["loss_mask"]
    loss_fn, state = fp8.next_token_loss(model_of()), jax.tree.map(jnp.copy, first_state(False))
    step, pending = fp8.make_train_step(loss_fn, SHOWING, None, 2), None
    for i in range(2):
        microbatch = jax.tree.map(lambda x, i=i: x[i::2], batch)
        pending = step.accumulate_step(state, pending or step.start(state), microbatch, i == 0)
    loss = float(step.apply_step(state, pending)[2]["loss"])
    of_tokens, weights = expected("loss_mask")[0], weights[:, 1:]
    assert loss == pytest.approx(np.mean([mean_of(of_tokens[i::2], weights[i::2]) for i in range(2)]), rel=1e-5)
    assert abs(loss - mean_of(of_tokens, weights)) > 1e-2
