"""A step on a mesh with `pipe` beside the same step on the same mesh without it: every schedule, every axis beside
`pipe`, recipes, models, optimizers.

Microbatches are the same, products of FP8 values are exact, and amaxes are maxima. So the FP8 state has the same bits,
and losses and gradients differ by the order of float32 sums alone.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attention_apart import attention_apart
from hybrid import SHOWING, assert_close, errors, gpt, make_mesh, tokens, train, with_scales
from pipelines import CURRENT, DELAYED, assert_is_same_step, dense, layers, loss_of, rows, variables_of

import jax_fp8 as fp8
from jax_fp8.core.recipe import Recipe
from jax_fp8.grads.tape import Totals
from jax_fp8.parallel import runner
from jax_fp8.parallel.schedules import SCHEDULES

SEQ, PAD = 16, 7
AFTER_ONE, AFTER_TWO = 1e-6, 1e-5  # params that differ in their last bit are now and then other values in FP8
LLAMA = {
    "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "num_kv_heads": 2, "tie_embeddings": False,
    "head_dim": 16, "qk_norm": True, "use_qkv_bias": True,
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
    "pipe 3, 1f1b, kernels that it does not split": own(3, "1f1b", 3, layers=3),
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
    "pipe 2, zero-bubble, recompute": of_gpt(own(2, "zero-bubble", 2), recompute=True),
}


@functools.cache
def loss_and_first_variables(recipe: Recipe | None, layer_count: int, of_gpt: Any, ignored: bool) -> tuple:
    if of_gpt is None:
        parts = {"first": dense(None)} | layers(recipe, layer_count) | {"last": dense(recipe)}
        return loss_of(parts), jax.jit(lambda: variables_of(parts))()
    model = gpt(recipe, num_layers=layer_count, hidden_size=64, max_seq_len=SEQ, **dict(of_gpt))
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, SEQ), jnp.int32))
    return fp8.next_token_loss(model, ignore_label=PAD if ignored else None), dict(variables)


def loss_and_variables(way: Way) -> tuple[Callable, dict]:
    return loss_and_first_variables(way.recipe, way.layers, way.model, way.ignored)


def batch_of(way: Way) -> np.ndarray:
    if way.model is None:
        return rows(64 * way.microbatches)
    batch = tokens(4 * way.microbatches, SEQ)
    if way.ignored:  # every row has another number of them
        batch[np.arange(SEQ + 1) >= SEQ - np.arange(len(batch))[:, None]] = PAD
    return batch


@functools.cache
def first_state(way: Way) -> fp8.TrainState:
    return fp8.TrainState.create(variables=with_scales(loss_and_variables(way)[1]), tx=SHOWING)


def step_of(way: Way, state=None, **options) -> tuple[fp8.TrainState, float]:
    """What comes out of the last step."""
    state = first_state(replace(way.without_pipe, axes=(), options=())) if state is None else state
    axes = dict(way.axes) | ({"pipe": way.pipe, "schedule": way.schedule} if way.pipe > 1 else {})
    schedule = axes.pop("schedule", None)
    options = {"schedule": schedule} | dict(way.options) | options
    states, losses = train(
        loss_and_variables(way)[0], state, batch_of(way), way.recipe,
        microbatches=way.microbatches, axes=axes or None, **options,
    )  # fmt: skip
    return states[-1], losses[-1]


@functools.cache
def without_pipe(way: Way) -> tuple[fp8.TrainState, float]:
    return step_of(way.without_pipe)


# Each has its schedule in another way, and its axes in another.
SLOW = {"fsdp 2, pipe 2, interleaved", "data 2, fsdp 2, pipe 2, 1f1b"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in WAYS])
def test_a_step_is_that_without_pipe(name):
    way = WAYS[name]
    assert_is_same_step(*step_of(way), *without_pipe(way.without_pipe))


AXES = {
    "pipe 2": (2, {}, {}),
    "pipe 4": (4, {}, {}),
    "tensor 2, pipe 2": (2, {"tensor": 2}, {}),
    "tensor 2, pipe 2, sequence": (2, {"tensor": 2}, SEQUENCE),
    "data 2, tensor 2, pipe 2": (2, {"data": 2, "tensor": 2}, {}),
    "data 2, tensor 2, pipe 2, sequence": (2, {"data": 2, "tensor": 2}, SEQUENCE),
}


# With the ways above every schedule meets `tensor`, and two of them sequence parallelism; the others are slow.
FAST = {("tensor 2, pipe 2, sequence", "gpipe"), ("tensor 2, pipe 2, sequence", "zero-bubble")}
EVERY = [
    pytest.param(name, schedule, marks=() if (name, schedule) in FAST else pytest.mark.slow)
    for name in AXES
    for schedule in SCHEDULES
]


@pytest.mark.parametrize(("name", "schedule"), EVERY)
def test_every_schedule_on_every_mesh(name, schedule, monkeypatch, traced_anew):
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention_apart)
    pipe, axes, options = AXES[name]
    way = of_gpt(own(pipe, schedule, 4, layers=pipe * (2 if schedule == "interleaved" else 1), **axes), options=options)
    assert_is_same_step(*step_of(way), *step_of(way.without_pipe))


def test_a_warm_start_finds_the_same_scales():
    way = WAYS["pipe 2, zero-bubble"]
    cold = fp8.TrainState.create(variables=loss_and_variables(way)[1], tx=SHOWING)
    assert all(np.any(scale == 1) for scale in scales_of(cold))
    state, loss = step_of(way, cold, warm_start=True)
    assert not any(np.any(scale == 1) for scale in scales_of(state))
    assert_is_same_step(state, loss, *step_of(way.without_pipe, cold, warm_start=True))


def scales_of(state: fp8.TrainState) -> list[jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(state.fp8)
    return [leaf for path, leaf in leaves if jax.tree_util.keystr(path).endswith("['scale']")]


def test_fused_adam_and_clipping_and_a_step_that_is_skipped():
    """The second of three batches has a NaN in one microbatch: of its step nothing is left."""
    tx = optax.chain(optax.clip_by_global_norm(0.01), fp8.fused_adamw(1e-2, eps=1e-2, skip_nonfinite=True))
    way = WAYS["pipe 2, 1f1b, current"]
    batch = batch_of(way)
    spoiled = np.where(np.arange(len(batch))[:, None] == 0, np.nan, batch)
    found = []
    for of in (way, way.without_pipe):
        mesh = make_mesh(pipe=2) if of.pipe > 1 else None
        step = fp8.make_train_step(loss_and_variables(of)[0], tx, CURRENT, 3, parallel=mesh)
        state = fp8.TrainState.create(variables=loss_and_variables(of)[1], tx=tx)
        state, params = step.place(state, batch), []
        for given in (batch, spoiled, batch):
            state, _ = step(state, given)
            params.append(jax.tree.map(np.asarray, state.params))
        found.append(params)
    ours, wanted = found
    jax.tree.map(np.testing.assert_array_equal, ours[1], ours[0])
    assert_close(ours[0], wanted[0], AFTER_ONE)
    assert_close(ours[2], wanted[2], AFTER_TWO)
    assert max(errors(ours[2], ours[0]).values()) > 100 * AFTER_TWO


def marks_an_amax(totals: Totals) -> Totals:
    return replace(totals, amaxes={gemm: amaxes.at[0, 0].max(100.0) for gemm, amaxes in totals.amaxes.items()})


def adds_to_gradients(totals: Totals) -> Totals:
    return replace(totals, sums=jax.tree.map(lambda total: total + 1e-4, totals.sums))


@pytest.mark.parametrize(
    ("leaves", "said"),
    [(marks_an_amax, "elements differ"), pytest.param(adds_to_gradients, "kernel", marks=pytest.mark.slow)],
)
def test_a_bubble_that_leaves_a_trace_is_noticed(monkeypatch, leaves, said):
    """Negative control."""

    def idle(work, inboxes, microbatch, taken):
        return replace(work, totals={number: leaves(totals) for number, totals in work.totals.items()})

    monkeypatch.setattr(runner, "_idle", idle)
    way = WAYS["pipe 2, gpipe"]
    with pytest.raises(AssertionError, match=said):
        assert_is_same_step(*step_of(way), *without_pipe(way.without_pipe))


@pytest.mark.slow
def test_activations_that_are_not_sent_are_noticed(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(jax.lax, "ppermute", lambda x, axis, pairs: x)
    way = WAYS["pipe 2, gpipe"]
    with pytest.raises(AssertionError):
        assert_is_same_step(*step_of(way), *without_pipe(way.without_pipe))
