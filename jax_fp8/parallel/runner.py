"""Runs a schedule on the stages of a pipeline: one loop over its ticks, the same program on all devices.

    table[tick, stage] ─a branch→ the stage's unit of work ─ppermute→ the neighbours' inboxes
                                                            └─ once for each group of microbatches: their losses

In each tick a stage runs the branch that its table names. An idle stage runs none, so a bubble changes no result. Each
branch is one kind of unit of one chunk, for one slot: the arrays that a forward keeps for the backward. Each slot has
arrays of its own, which are written and read as a whole: nothing is copied into a ring buffer, or out of one. A long
pipeline has many slots. Its branches are then divided among several conditionals, of which at most one is not idle.
Each conditional takes its own slots only, since the time of compiling one is quadratic in its operands.

The array `edge` has a row for each microbatch. On the first stage it holds the model's inputs, on the last stage the
outputs of the layers. Gradients replace both, row by row. All stages together compute the losses of a group, which has
as many microbatches as there are stages: each stage computes one.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.shards import scattered_sum
from jax_fp8.core.types import PyTree
from jax_fp8.parallel.mesh import PIPE
from jax_fp8.parallel.schedule import BACKWARD, FORWARD, INPUT_GRADIENT
from jax_fp8.parallel.ticks import Branch, Ticks


class Chunk(Protocol):
    """The units of work of one chunk of a stage's layers. `totals` is any tree, to which all units add."""

    def no_totals(self) -> PyTree:
        """The totals before the first unit."""
        ...

    def forward(self, x: jax.Array) -> tuple[jax.Array, PyTree]:
        """The result, of the shape and dtype of `x`, and the arrays that it keeps for the backward."""
        ...

    def backward(self, kept: PyTree, dy: jax.Array, totals: PyTree) -> tuple[jax.Array, PyTree]:
        """The gradient of `x`, and the new totals."""
        ...

    def input_gradient(self, kept: PyTree, dy: jax.Array, totals: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
        """The gradient of `x`, the operands of the weight gradient, and the new totals."""
        ...

    def weight_gradient(self, kept: PyTree, operands: PyTree, totals: PyTree) -> PyTree:
        """The new totals."""
        ...


Loss = Callable[[jax.Array, jax.Array, PyTree], tuple[jax.Array, PyTree]]

# Names of a tick's conditionals in the compiled program: those of units have a number behind it, losses have one.
UNIT, LOSSES = "pipeline_unit", "pipeline_losses"
MOST_WORK = 10_000_000  # of compiling one conditional: its branches times the square of the number of its operands
SlotName = tuple[int, int]  # chunk, number


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Work:
    """The arrays that units read and write.

    `kept` and `operands`: of each slot. `totals`: of each chunk. `edge`: (microbatches, ...). `y`, `dx`: to be sent.
    """

    kept: dict[SlotName, PyTree]
    operands: dict[SlotName, PyTree]
    totals: dict[int, PyTree]
    edge: jax.Array
    y: jax.Array
    dx: jax.Array

    def in_slots(self, slots: Collection[SlotName]) -> "_Work":
        """The arrays of these slots and of their chunks alone."""
        kept, operands = (
            {slot: arrays[slot] for slot in slots if slot in arrays} for arrays in (self.kept, self.operands)
        )
        chunks = {chunk for chunk, _ in slots}
        return replace(self, kept=kept, operands=operands, totals={chunk: self.totals[chunk] for chunk in chunks})

    def with_done(self, done: "_Work") -> "_Work":
        """With the new arrays of some slots; all others stay."""
        kept, operands, totals = self.kept | done.kept, self.operands | done.operands, self.totals | done.totals
        return replace(done, kept=kept, operands=operands, totals=totals)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Inboxes:
    """Arrays (places + 1, ...) that arrived: activations from the previous stage, gradients from the next one."""

    activations: jax.Array
    gradients: jax.Array


def run_schedule(
    ticks: Ticks,
    chunks: Sequence[Chunk],
    loss: Loss,
    inputs: jax.Array,
    loss_totals: PyTree,
    uninitialized: Callable[[PyTree], PyTree],
) -> tuple[jax.Array, list[PyTree], PyTree]:
    """Run all units of a schedule, on every device of the axis `pipe` of a `shard_map`.

    Args:
      chunks: the chunks of the stage.
      loss: `loss(number, y, totals) -> dy, totals`: `y` is the output of the last stage for the microbatch `number`
        i32[]. Where the last group is not whole, some numbers are past the last microbatch. For these it must return
        the totals unchanged.
      inputs: (groups * stages, ...), the inputs of the first stage; any finite numbers past the last microbatch.
      loss_totals: the totals of the loss before the first microbatch.
      uninitialized: makes arrays of these shapes, which are written before they are read.

    Returns:
      The gradients of the inputs, zeros on all stages but the first; the totals of the chunks; and those of the loss.
    """
    stages = ticks.branch.shape[1]
    stage = lax.axis_index(PIPE)
    is_last = stage == stages - 1
    work, inboxes = _empty(ticks, chunks, inputs, uninitialized)
    conditionals = _conditionals(ticks.branches, work)
    programs = [[_branch(branch, chunks, stage == 0, is_last) for branch in own] for own in conditionals]

    def tick(carry: tuple[_Work, _Inboxes, PyTree], row: tuple) -> tuple[tuple[_Work, _Inboxes, PyTree], None]:
        work, inboxes, loss_totals = carry
        indices, microbatch, taken, put_activation, put_gradient, group = row
        for number, (own, index) in enumerate(zip(conditionals, indices, strict=True)):
            slots = {(branch.chunk, branch.slot) for branch in own}
            with jax.named_scope(f"{UNIT}_{number}"):
                done = lax.switch(index, [_idle, *programs[number]], work.in_slots(slots), inboxes, microbatch, taken)
            work = work.with_done(done)
        y = lax.ppermute(work.y, PIPE, [(s, (s + 1) % stages) for s in range(stages)])
        dx = lax.ppermute(work.dx, PIPE, [((s + 1) % stages, s) for s in range(stages)])
        activations = inboxes.activations.at[put_activation].set(y)
        gradients = inboxes.gradients.at[put_gradient].set(dx)
        with jax.named_scope(LOSSES):
            edge, loss_totals = lax.cond(group >= 0, losses, lambda *before: before[:2], work.edge, loss_totals, group)
        return (replace(work, edge=edge), _Inboxes(activations, gradients), loss_totals), None

    def losses(edge: jax.Array, loss_totals: PyTree, group: jax.Array) -> tuple[jax.Array, PyTree]:
        first = group * stages
        outputs = lax.dynamic_slice_in_dim(edge, first, stages)
        # Only the last stage has outputs: the sum sends each stage one of them.
        own = scattered_sum(jnp.where(is_last, outputs, 0), PIPE, 0)
        dy, loss_totals = loss(first + stage, own[0], loss_totals)
        gradients = jnp.where(is_last, lax.all_gather(dy, PIPE), outputs)
        return lax.dynamic_update_slice_in_dim(edge, gradients, first, 0), loss_totals

    tables = ticks.branch, ticks.microbatch, ticks.taken, ticks.put_activation, ticks.put_gradient
    branch, *rows = (jnp.asarray(table)[:, stage] for table in tables)
    rows = [*_indices(branch, conditionals)], *rows, jnp.asarray(ticks.loss)
    (work, _, loss_totals), _ = lax.scan(tick, (work, inboxes, loss_totals), rows)
    return jnp.where(stage == 0, work.edge, 0), [work.totals[number] for number in range(len(chunks))], loss_totals


def _conditionals(branches: Sequence[Branch], work: _Work) -> list[list[Branch]]:
    """The branches of each conditional of a tick, all branches of a slot in one: as few conditionals as compile in
    little time.
    """
    sizes = {slot: 1 + len(jax.tree.leaves((kept, work.operands.get(slot)))) for slot, kept in work.kept.items()}
    together = sum(sizes.values())
    count = math.ceil(math.sqrt(len(branches) / MOST_WORK) * together)
    conditionals: list[list[Branch]] = [[] for _ in range(count)]
    before = 0
    for slot, own in itertools.groupby(branches, lambda branch: (branch.chunk, branch.slot)):
        conditionals[before * count // together] += own
        before += sizes[slot]
    return [own for own in conditionals if own]


def _indices(branch: jax.Array, conditionals: list[list[Branch]]) -> Iterator[jax.Array]:
    """For each conditional the branch that it takes, i32[ticks]: 0 where another conditional has the branch, or the
    stage is idle.
    """
    first = 0
    for own in conditionals:
        yield jnp.where((branch > first) & (branch <= first + len(own)), branch - first, 0)
        first += len(own)


def _idle(work: _Work, inboxes: _Inboxes, microbatch: jax.Array, taken: jax.Array) -> _Work:
    return work


def _branch(branch: Branch, chunks: Sequence[Chunk], is_first: jax.Array, is_last: jax.Array) -> Callable[..., _Work]:
    """The program of one kind of unit, of one chunk, in one slot."""
    number, slot = branch.chunk, (branch.chunk, branch.slot)
    chunk = chunks[number]
    enters, leaves = is_first & (number == 0), is_last & (number == len(chunks) - 1)

    def forward(work: _Work, inboxes: _Inboxes, microbatch: jax.Array, taken: jax.Array) -> _Work:
        x = jnp.where(enters, work.edge[microbatch], inboxes.activations[taken])
        y, kept = chunk.forward(x)
        edge = work.edge.at[microbatch].set(jnp.where(leaves, y, work.edge[microbatch]))
        return replace(work, y=y, edge=edge, kept=work.kept | {slot: kept})

    def gradient_of(work: _Work, inboxes: _Inboxes, microbatch: jax.Array, taken: jax.Array) -> jax.Array:
        return jnp.where(leaves, work.edge[microbatch], inboxes.gradients[taken])

    def after(work: _Work, microbatch: jax.Array, dx: jax.Array, totals: PyTree) -> _Work:
        edge = work.edge.at[microbatch].set(jnp.where(enters, dx, work.edge[microbatch]))
        return replace(work, dx=dx, edge=edge, totals=work.totals | {number: totals})

    def backward(work: _Work, inboxes: _Inboxes, microbatch: jax.Array, taken: jax.Array) -> _Work:
        dy = gradient_of(work, inboxes, microbatch, taken)
        return after(work, microbatch, *chunk.backward(work.kept[slot], dy, work.totals[number]))

    def input_gradient(work: _Work, inboxes: _Inboxes, microbatch: jax.Array, taken: jax.Array) -> _Work:
        dy = gradient_of(work, inboxes, microbatch, taken)
        dx, operands, totals = chunk.input_gradient(work.kept[slot], dy, work.totals[number])
        work = replace(work, operands=work.operands | {slot: operands})
        return after(work, microbatch, dx, totals)

    def weight_gradient(work: _Work, inboxes: _Inboxes, microbatch: jax.Array, taken: jax.Array) -> _Work:
        totals = chunk.weight_gradient(work.kept[slot], work.operands[slot], work.totals[number])
        return replace(work, totals=work.totals | {number: totals})

    return {FORWARD: forward, BACKWARD: backward, INPUT_GRADIENT: input_gradient}.get(branch.kind, weight_gradient)


def _empty(
    ticks: Ticks, chunks: Sequence[Chunk], inputs: jax.Array, uninitialized: Callable[[PyTree], PyTree]
) -> tuple[_Work, _Inboxes]:
    """The arrays before the first tick."""
    x = jax.ShapeDtypeStruct(inputs.shape[1:], inputs.dtype)
    has_halves = any(branch.kind is INPUT_GRADIENT for branch in ticks.branches)
    kept: dict[SlotName, PyTree] = {}
    operands: dict[SlotName, PyTree] = {}
    for number, (chunk, slots) in enumerate(zip(chunks, ticks.slots, strict=True)):
        y, own_kept, own_operands = jax.eval_shape(partial(_run_units, chunk, has_halves), inputs)
        check_returns_what_it_takes(x, y)
        kept |= {(number, slot): own_kept for slot in range(slots)}
        if has_halves:
            operands |= {(number, slot): own_operands for slot in range(slots)}
    inbox = jax.ShapeDtypeStruct((ticks.places + 1, *x.shape), x.dtype)
    kept, operands, activations, gradients = uninitialized((kept, operands, inbox, inbox))
    nothing = jnp.zeros(x.shape, x.dtype)
    totals = {number: chunk.no_totals() for number, chunk in enumerate(chunks)}
    return _Work(kept, operands, totals, inputs, nothing, nothing), _Inboxes(activations, gradients)


def _run_units(chunk: Chunk, has_halves: bool, inputs: jax.Array) -> tuple[jax.Array, PyTree, PyTree]:
    """The result of a forward, what it keeps, and the operands that an input gradient returns. Its arguments have the
    types that those of the branches have, so jax traces each unit once for both.
    """
    x = inputs[0]
    y, kept = chunk.forward(x)
    return y, kept, chunk.input_gradient(kept, x, chunk.no_totals())[1] if has_halves else None


def check_returns_what_it_takes(x: jax.Array | jax.ShapeDtypeStruct, y: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raise unless the output `y` of a layer has the shape and dtype of its input `x`."""
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"a layer of a pipeline must return what it takes, {x.dtype} {x.shape}, got {y.dtype} {y.shape}; "
            "put what changes it before or after the layers"
        )
