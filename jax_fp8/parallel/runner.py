"""What runs a schedule on the stages of a pipeline: one loop over its ticks, the same program on all devices.

    table[tick, stage] ─a branch→ the stage's unit of work ─ppermute→ the neighbours' inboxes
                                                            └─ once for each group of microbatches: their losses

In each tick a stage runs the branch that its table says; an idle stage runs none, so a bubble leaves no trace. Each
branch is one kind of work of one chunk, for one slot of what is kept from the forward to the backward. Slots are arrays
of their own, written as a whole and read as a whole: nothing is copied into a ring, or out of one. A long pipeline has
many slots, and its branches are shared out to several conditionals, of which at most one is not idle: each is handed
its own slots only, since compiling takes a time that is quadratic in what a branch is handed.

What enters the first stage and leaves the last one is kept at the edge, an array of all microbatches: inputs on the
first stage, of which the gradients take the place; outputs on the last one, likewise. The loss of a group, as many
microbatches as stages, is computed by all stages, one microbatch each.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.shards import scattered_sum
from jax_fp8.parallel.mesh import PIPE
from jax_fp8.parallel.schedule import BACKWARD, FORWARD, INPUT_GRADIENT
from jax_fp8.parallel.ticks import Branch, Ticks


class Chunk(Protocol):
    """What a stage computes of one chunk of its layers. `totals` are what all units add to, any tree."""

    def no_totals(self) -> Any:
        """Before the first unit."""
        ...

    def forward(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """The result, like `x`, and what is kept of it."""
        ...

    def backward(self, kept: Any, dy: jax.Array, totals: Any) -> tuple[jax.Array, Any]:
        """The gradient of `x`, and totals."""
        ...

    def input_gradient(self, kept: Any, dy: jax.Array, totals: Any) -> tuple[jax.Array, Any, Any]:
        """The gradient of `x`, the operands of the weight gradient, and totals."""
        ...

    def weight_gradient(self, kept: Any, operands: Any, totals: Any) -> Any:
        """Totals."""
        ...


Loss = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

# What the conditionals of a tick are called in the compiled program: those of units, by number, and that of losses.
UNIT, LOSSES = "pipeline_unit", "pipeline_losses"
MOST_WORK = 10_000_000  # of compiling a conditional: its branches times the square of the arrays that it is handed
SlotName = tuple[int, int]  # chunk, number


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Work:
    """What units read and write.

    `kept` and `operands`: of each slot. `totals`: of each chunk. `edge`: (microbatches, ...). `y`, `dx`: to be sent.
    """

    kept: dict[SlotName, Any]
    operands: dict[SlotName, Any]
    totals: dict[int, Any]
    edge: jax.Array
    y: jax.Array
    dx: jax.Array

    def of(self, slots: Collection[SlotName]) -> "_Work":
        """Of these slots alone."""
        kept, operands = (
            {slot: found[slot] for slot in slots if slot in found} for found in (self.kept, self.operands)
        )
        chunks = {chunk for chunk, _ in slots}
        return replace(self, kept=kept, operands=operands, totals={chunk: self.totals[chunk] for chunk in chunks})

    def with_done(self, done: "_Work") -> "_Work":
        """What has been done by some slots, and all others."""
        kept, operands, totals = self.kept | done.kept, self.operands | done.operands, self.totals | done.totals
        return replace(done, kept=kept, operands=operands, totals=totals)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Inboxes:
    """What has come from the stage before and from the stage behind, (places + 1, ...)."""

    activations: jax.Array
    gradients: jax.Array


def run_schedule(
    ticks: Ticks,
    chunks: Sequence[Chunk],
    loss: Loss,
    inputs: jax.Array,
    of_loss: Any,
    uninitialized: Callable[[Any], Any],
) -> tuple[jax.Array, list[Any], Any]:
    """Run all units of a schedule, on every device of the axis `pipe` of a `shard_map`.

    Args:
      chunks: of the stage.
      loss: `loss(number, y, totals) -> dy, totals`, of the microbatch i32[] that has left the last stage. Where the
        last group is not whole, there are numbers behind the last microbatch: they must leave the totals as they are.
      inputs: (groups * stages, ...), what enters the first stage; behind the last microbatch anything finite.
      of_loss: the totals of the loss before the first.
      uninitialized: makes arrays of these shapes, whose content nobody reads.

    Returns:
      The gradients of the inputs, on all other stages zeros; the totals of the chunks, and those of the loss.
    """
    stages = ticks.branch.shape[1]
    stage = lax.axis_index(PIPE)
    is_last = stage == stages - 1
    work, inboxes = _empty(ticks, chunks, inputs, uninitialized)
    conditionals = _conditionals(ticks.branches, work)
    programs = [[_branch(branch, chunks, stage == 0, is_last) for branch in own] for own in conditionals]

    def tick(carry, row):
        work, inboxes, of_loss = carry
        indices, microbatch, taken, put_activation, put_gradient, group = row
        for number, (own, index) in enumerate(zip(conditionals, indices, strict=True)):
            slots = {(branch.chunk, branch.slot) for branch in own}
            with jax.named_scope(f"{UNIT}_{number}"):
                done = lax.switch(index, [_idle, *programs[number]], work.of(slots), inboxes, microbatch, taken)
            work = work.with_done(done)
        y = lax.ppermute(work.y, PIPE, [(s, (s + 1) % stages) for s in range(stages)])
        dx = lax.ppermute(work.dx, PIPE, [((s + 1) % stages, s) for s in range(stages)])
        activations = inboxes.activations.at[put_activation].set(y)
        gradients = inboxes.gradients.at[put_gradient].set(dx)
        with jax.named_scope(LOSSES):
            edge, of_loss = lax.cond(group >= 0, losses, lambda *before: before[:2], work.edge, of_loss, group)
        return (replace(work, edge=edge), _Inboxes(activations, gradients), of_loss), None

    def losses(edge, of_loss, group):
        first = group * stages
        of_group = lax.dynamic_slice_in_dim(edge, first, stages)
        own = scattered_sum(jnp.where(is_last, of_group, 0), PIPE, 0)
        dy, of_loss = loss(first + stage, own[0], of_loss)
        gradients = jnp.where(is_last, lax.all_gather(dy, PIPE), of_group)
        return lax.dynamic_update_slice_in_dim(edge, gradients, first, 0), of_loss

    of_stages = ticks.branch, ticks.microbatch, ticks.taken, ticks.put_activation, ticks.put_gradient
    branch, *rows = (jnp.asarray(table)[:, stage] for table in of_stages)
    rows = [*_indices(branch, conditionals)], *rows, jnp.asarray(ticks.loss)
    (work, _, of_loss), _ = lax.scan(tick, (work, inboxes, of_loss), rows)
    return jnp.where(stage == 0, work.edge, 0), [work.totals[number] for number in range(len(chunks))], of_loss


def _conditionals(branches: Sequence[Branch], work: _Work) -> list[list[Branch]]:
    """The branches of each conditional of a tick, those of a slot in one: as few as leave little work of compiling."""
    sizes = {slot: 1 + len(jax.tree.leaves((kept, work.operands.get(slot)))) for slot, kept in work.kept.items()}
    together = sum(sizes.values())
    count = math.ceil(math.sqrt(len(branches) / MOST_WORK) * together)
    found: list[list[Branch]] = [[] for _ in range(count)]
    before = 0
    for slot, of_slot in itertools.groupby(branches, lambda branch: (branch.chunk, branch.slot)):
        found[before * count // together] += of_slot
        before += sizes[slot]
    return [own for own in found if own]


def _indices(branch: jax.Array, conditionals: list[list[Branch]]) -> Iterator[jax.Array]:
    """For each conditional the branches that it takes, i32[ticks]: 0 where another has it, or none."""
    first = 0
    for own in conditionals:
        yield jnp.where((branch > first) & (branch <= first + len(own)), branch - first, 0)
        first += len(own)


def _idle(work, inboxes, microbatch, taken) -> _Work:
    return work


def _branch(branch: Branch, chunks: Sequence[Chunk], is_first, is_last) -> Callable:
    """The program of one kind of work, of one chunk, in one slot."""
    number, slot = branch.chunk, (branch.chunk, branch.slot)
    chunk = chunks[number]
    enters, leaves = is_first & (number == 0), is_last & (number == len(chunks) - 1)

    def forward(work: _Work, inboxes: _Inboxes, microbatch, taken):
        x = jnp.where(enters, work.edge[microbatch], inboxes.activations[taken])
        y, kept = chunk.forward(x)
        edge = work.edge.at[microbatch].set(jnp.where(leaves, y, work.edge[microbatch]))
        return replace(work, y=y, edge=edge, kept=work.kept | {slot: kept})

    def gradient_of(work: _Work, inboxes: _Inboxes, microbatch, taken):
        return jnp.where(leaves, work.edge[microbatch], inboxes.gradients[taken])

    def after(work: _Work, microbatch, dx, totals) -> _Work:
        edge = work.edge.at[microbatch].set(jnp.where(enters, dx, work.edge[microbatch]))
        return replace(work, dx=dx, edge=edge, totals=work.totals | {number: totals})

    def backward(work: _Work, inboxes: _Inboxes, microbatch, taken):
        dy = gradient_of(work, inboxes, microbatch, taken)
        return after(work, microbatch, *chunk.backward(work.kept[slot], dy, work.totals[number]))

    def input_gradient(work: _Work, inboxes: _Inboxes, microbatch, taken):
        dy = gradient_of(work, inboxes, microbatch, taken)
        dx, operands, totals = chunk.input_gradient(work.kept[slot], dy, work.totals[number])
        work = replace(work, operands=work.operands | {slot: operands})
        return after(work, microbatch, dx, totals)

    def weight_gradient(work: _Work, inboxes: _Inboxes, microbatch, taken):
        totals = chunk.weight_gradient(work.kept[slot], work.operands[slot], work.totals[number])
        return replace(work, totals=work.totals | {number: totals})

    return {FORWARD: forward, BACKWARD: backward, INPUT_GRADIENT: input_gradient}.get(branch.kind, weight_gradient)


def _empty(ticks: Ticks, chunks, inputs, uninitialized) -> tuple[_Work, _Inboxes]:
    """Before the first tick."""
    x = jax.ShapeDtypeStruct(inputs.shape[1:], inputs.dtype)
    has_halves = any(branch.kind is INPUT_GRADIENT for branch in ticks.branches)
    kept, operands = {}, {}
    for number, (chunk, slots) in enumerate(zip(chunks, ticks.slots, strict=True)):
        y, of_forward, of_halves = jax.eval_shape(partial(_shapes_of_units, chunk, has_halves), inputs)
        check_returns_what_it_takes(x, y)
        kept |= {(number, slot): of_forward for slot in range(slots)}
        if has_halves:
            operands |= {(number, slot): of_halves for slot in range(slots)}
    inbox = jax.ShapeDtypeStruct((ticks.places + 1, *x.shape), x.dtype)
    kept, operands, activations, gradients = uninitialized((kept, operands, inbox, inbox))
    nothing = jnp.zeros(x.shape, x.dtype)
    totals = {number: chunk.no_totals() for number, chunk in enumerate(chunks)}
    return _Work(kept, operands, totals, inputs, nothing, nothing), _Inboxes(activations, gradients)


def _shapes_of_units(chunk: Chunk, has_halves: bool, inputs: jax.Array) -> tuple[jax.Array, Any, Any]:
    """What a forward returns, and the operands that an input gradient leaves. The units are called with arguments of
    the types that branches have, so that jax traces each once for both.
    """
    x = inputs[0]
    y, kept = chunk.forward(x)
    return y, kept, chunk.input_gradient(kept, x, chunk.no_totals())[1] if has_halves else None


def check_returns_what_it_takes(x: Any, y: Any) -> None:
    """Raise unless what enters a layer and what leaves it have one shape and one dtype."""
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"a layer of a pipeline must return what it takes, {x.dtype} {x.shape}, got {y.dtype} {y.shape}; "
            "put what changes it before or after the layers"
        )
