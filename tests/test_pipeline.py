"""A step on a mesh with `pipe` beside the same step on the same mesh without it: every schedule, every axis beside
`pipe`, recipes, models, optimizers.

Microbatches are the same, products of FP8 values are exact, and amaxes are maxima. So the FP8 state has the same bits,
and losses and gradients differ by the order of float32 sums alone.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import SHOWING, errors, gpt, gradients_of, tokens, train
from pipelines import CURRENT, DELAYED, assert_is_same_step, dense, layers, loss_of, rows, variables_of

import jax_fp8 as fp8
from jax_fp8.core.recipe import Recipe
from jax_fp8.parallel import runner
from jax_fp8.train.stage_work import Totals

SEQ, PAD = 16, 7
LLAMA = {
    "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "num_kv_heads": 2, "tie_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A step.

    Args:
      axes: beside `pipe`.
      model: fields of a GPT; None is a loss of the user's own, of so many `layers`.
      options: of the step, with `pipe` and without.
    """

    pipe: int
    schedule: str | None
    microbatches: int
    recipe: Recipe | None = DELAYED
    axes: tuple[tuple[str, int], ...] = ()
    layers: int = 2
    model: tuple[tuple[str, Any], ...] | None = None
    ignored: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def without_pipe(self) -> "Way":
        return replace(self, pipe=1, schedule=None)


def own(pipe, schedule, microbatches, recipe=DELAYED, layers=2, **axes) -> Way:
    return Way(pipe, schedule, microbatches, recipe, tuple(axes.items()), layers)


def of_gpt(way: Way, ignored=False, options=MappingProxyType({}), **fields) -> Way:
    return replace(way, model=tuple(fields.items()), ignored=ignored, options=tuple(options.items()))


SEQUENCE = {"sequence_parallel": True}
WAYS = {
    "pipe 2, gpipe": own(2, "gpipe", 3),
    "pipe 2, 1f1b, current": own(2, "1f1b", 3, CURRENT),
    "pipe 2, interleaved": own(2, "interleaved", 4, layers=4),
    "pipe 2, zero-bubble": own(2, "zero-bubble", 5),
    "pipe 4, 1f1b": own(4, "1f1b", 6, layers=4),
    "fsdp 2, pipe 2, interleaved": own(2, "interleaved", 2, layers=4, fsdp=2),
    "fsdp 2, pipe 2, gpipe, bfloat16": own(2, "gpipe", 2, None, fsdp=2),
    "data 2, fsdp 2, pipe 2, 1f1b": own(2, "1f1b", 2, data=2, fsdp=2),
    "data 2, fsdp 2, pipe 2, zero-bubble, current": own(2, "zero-bubble", 2, CURRENT, data=2, fsdp=2),
    "data 2, tensor 2, pipe 2, gpipe, current": own(2, "gpipe", 2, CURRENT, data=2, tensor=2),
    "data 2, tensor 2, pipe 2, interleaved": own(2, "interleaved", 2, layers=4, data=2, tensor=2),
    "tensor 2, pipe 2, zero-bubble, like Llama": of_gpt(own(2, "zero-bubble", 2, tensor=2), **LLAMA),
    "tensor 2, pipe 2, 1f1b, sequence": of_gpt(
        own(2, "1f1b", 3, tensor=2), ignored=True, options=SEQUENCE, head_recipe=CURRENT
    ),
    "pipe 2, 1f1b, recompute": of_gpt(own(2, "1f1b", 2), recompute=True),
}


def loss_and_variables(way: Way) -> tuple[Callable, dict]:
    if way.model is None:
        parts = {"first": dense(None)} | layers(way.recipe, way.layers) | {"last": dense(way.recipe)}
        return loss_of(parts), variables_of(parts)
    model = gpt(way.recipe, num_layers=way.layers, hidden_size=64, max_seq_len=SEQ, **dict(way.model))
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, SEQ), jnp.int32))
    return fp8.next_token_loss(model, ignore_label=PAD if way.ignored else None), dict(variables)


def batch_of(way: Way) -> np.ndarray:
    if way.model is None:
        return rows(64 * way.microbatches)
    batch = tokens(4 * way.microbatches, SEQ)
    if way.ignored:  # every row has another number of them
        batch[np.arange(SEQ + 1) >= SEQ - np.arange(len(batch))[:, None]] = PAD
    return batch


@functools.cache
def first_state(way: Way) -> fp8.TrainState:
    """With scales of a first pass: with ones, gradients would vanish."""
    loss_fn, variables = loss_and_variables(way)
    if "fp8" in variables:
        variables["fp8"] = jax.jit(fp8.warm_start(loss_fn, way.recipe))(variables, batch_of(way))
    return fp8.TrainState.create(variables=variables, tx=SHOWING)


def step_of(way: Way, state=None, **options) -> tuple[fp8.TrainState, float]:
    """What comes out of the last step."""
    state = first_state(replace(way.without_pipe, axes=(), options=())) if state is None else state
    axes = dict(way.axes) | ({"pipe": way.pipe, "schedule": way.schedule} if way.pipe > 1 else {})
    schedule = axes.pop("schedule", None)
    options = {"warm_start": False, "schedule": schedule} | dict(way.options) | options
    states, losses = train(
        loss_and_variables(way)[0], state, batch_of(way), way.recipe,
        microbatches=way.microbatches, axes=axes or None, **options,
    )  # fmt: skip
    return states[-1], losses[-1]


@functools.cache
def without_pipe(way: Way) -> tuple[fp8.TrainState, float]:
    return step_of(way.without_pipe)


@pytest.mark.parametrize("name", WAYS)
def test_a_step_is_that_without_pipe(name):
    way = WAYS[name]
    assert_is_same_step(*step_of(way), *without_pipe(way.without_pipe))
