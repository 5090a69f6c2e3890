"""What runs a schedule on the stages of a pipeline: one loop over its ticks, the same program on all devices.

    table[tick, stage] ─a branch→ the stage's unit of work ─ppermute→ the neighbours' inboxes
                                                            └─ once for each group of microbatches: their losses

In each tick a stage runs the branch that its table says; an idle stage runs none, so a bubble leaves no trace. Each
branch is one kind of work of one chunk, for one slot of what is kept from the forward to the backward. Slots are arrays
of their own, written as a whole and read as a whole: nothing is copied into a ring, or out of one.

What enters the first stage and leaves the last one is kept at the edge, an array of all microbatches: inputs on the
first stage, of which the gradients take the place; outputs on the last one, likewise. The loss of a group, as many
microbatches as stages, is computed by all stages, one microbatch each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Carry:
    """What goes from tick to tick.

    `kept` and `operands`: of each chunk, of each slot. `edge`: (microbatches, ...). `activations`, `gradients`: the
    inboxes, (places + 1, ...). `y`, `dx`: to be sent. `totals`: of each chunk.
    """

    kept: Any
    operands: Any
    edge: jax.Array
    activations: jax.Array
    gradients: jax.Array
    y: jax.Array
    dx: jax.Array
    totals: list[Any]
    of_loss: Any


def run_schedule(
    ticks: Ticks,
    chunks: Sequence[Chunk],
    loss: Loss,
    inputs: jax.Array,
    of_loss: Any,
    room: Callable[[Any], Any],
) -> tuple[jax.Array, list[Any], Any]:
    """Run all units of a schedule, on every device of the axis `pipe` of a `shard_map`.

    Args:
      chunks: of the stage.
      loss: `loss(number, y, totals) -> dy, totals`, of the microbatch i32[] that has left the last stage. Where the
        last group is not whole, there are numbers behind the last microbatch: they must leave the totals as they are.
      inputs: (groups * stages, ...), what enters the first stage; behind the last microbatch anything finite.
      of_loss: the totals of the loss before the first.
      room: makes arrays of these shapes, whose content nobody reads.

    Returns:
      The gradients of the inputs, on all other stages zeros; the totals of the chunks, and those of the loss.
    """
    stages = ticks.branch.shape[1]
    stage = lax.axis_index(PIPE)
    is_last = stage == stages - 1
    branches = [_idle, *(_branch(branch, chunks, stage == 0, is_last) for branch in ticks.branches)]

    def tick(carry: _Carry, row):
        branch, microbatch, taken, put_activation, put_gradient, group = row
        carry = lax.switch(branch, branches, carry, microbatch, taken)
        y = lax.ppermute(carry.y, PIPE, [(s, (s + 1) % stages) for s in range(stages)])
        dx = lax.ppermute(carry.dx, PIPE, [((s + 1) % stages, s) for s in range(stages)])
        activations = carry.activations.at[put_activation].set(y)
        gradients = carry.gradients.at[put_gradient].set(dx)
        carry = replace(carry, activations=activations, gradients=gradients)
        return lax.cond(group >= 0, losses, lambda carry, _: carry, carry, group), None

    def losses(carry: _Carry, group):
        first = group * stages
        of_group = lax.dynamic_slice_in_dim(carry.edge, first, stages)
        own = lax.psum_scatter(jnp.where(is_last, of_group, 0), PIPE, scatter_dimension=0, tiled=True)
        dy, of_loss = loss(first + stage, own[0], carry.of_loss)
        gradients = jnp.where(is_last, lax.all_gather(dy, PIPE), of_group)
        return replace(carry, edge=lax.dynamic_update_slice_in_dim(carry.edge, gradients, first, 0), of_loss=of_loss)

    of_stages = ticks.branch, ticks.microbatch, ticks.taken, ticks.put_activation, ticks.put_gradient
    rows = [jnp.asarray(table)[:, stage] for table in of_stages]
    carry, _ = lax.scan(tick, _empty(ticks, chunks, inputs, of_loss, room), (*rows, jnp.asarray(ticks.loss)))
    return jnp.where(stage == 0, carry.edge, 0), carry.totals, carry.of_loss


def _idle(carry, microbatch, taken) -> _Carry:
    return carry


def _branch(branch: Branch, chunks: Sequence[Chunk], is_first, is_last) -> Callable:
    """The program of one kind of work, of one chunk, in one slot."""
    number, slot = branch.chunk, branch.slot
    chunk = chunks[number]
    enters, leaves = is_first & (number == 0), is_last & (number == len(chunks) - 1)

    def forward(carry: _Carry, microbatch, taken):
        x = jnp.where(enters, carry.edge[microbatch], carry.activations[taken])
        y, kept = chunk.forward(x)
        edge = carry.edge.at[microbatch].set(jnp.where(leaves, y, carry.edge[microbatch]))
        return replace(carry, y=y, edge=edge, kept=_put(carry.kept, branch, kept))

    def gradient_of(carry: _Carry, microbatch, taken):
        return jnp.where(leaves, carry.edge[microbatch], carry.gradients[taken])

    def after(carry: _Carry, microbatch, dx, totals) -> _Carry:
        edge = carry.edge.at[microbatch].set(jnp.where(enters, dx, carry.edge[microbatch]))
        return replace(carry, dx=dx, edge=edge, totals=_put_at(carry.totals, number, totals))

    def backward(carry: _Carry, microbatch, taken):
        dy = gradient_of(carry, microbatch, taken)
        return after(carry, microbatch, *chunk.backward(carry.kept[number][slot], dy, carry.totals[number]))

    def input_gradient(carry: _Carry, microbatch, taken):
        dy = gradient_of(carry, microbatch, taken)
        dx, operands, totals = chunk.input_gradient(carry.kept[number][slot], dy, carry.totals[number])
        carry = replace(carry, operands=_put(carry.operands, branch, operands))
        return after(carry, microbatch, dx, totals)

    def weight_gradient(carry: _Carry, microbatch, taken):
        kept, operands = carry.kept[number][slot], carry.operands[number][slot]
        totals = chunk.weight_gradient(kept, operands, carry.totals[number])
        return replace(carry, totals=_put_at(carry.totals, number, totals))

    return {FORWARD: forward, BACKWARD: backward, INPUT_GRADIENT: input_gradient}.get(branch.kind, weight_gradient)


def _empty(ticks: Ticks, chunks, inputs, of_loss, room) -> _Carry:
    """Before the first tick."""
    x = jax.ShapeDtypeStruct(inputs.shape[1:], inputs.dtype)
    has_halves = any(branch.kind is INPUT_GRADIENT for branch in ticks.branches)
    kept, operands = [], []
    for chunk, slots in zip(chunks, ticks.slots, strict=True):
        y, of_forward = jax.eval_shape(chunk.forward, x)
        check_returns_what_it_takes(x, y)
        kept.append([of_forward] * slots)
        if has_halves:
            _, of_halves, _ = jax.eval_shape(chunk.input_gradient, of_forward, x, jax.eval_shape(chunk.no_totals))
            operands.append([of_halves] * slots)
    inbox = jax.ShapeDtypeStruct((ticks.places + 1, *x.shape), x.dtype)
    kept, operands, activations, gradients = room((kept, operands, inbox, inbox))
    nothing = jnp.zeros(x.shape, x.dtype)
    totals = [chunk.no_totals() for chunk in chunks]
    return _Carry(kept, operands, inputs, activations, gradients, nothing, nothing, totals, of_loss)


def check_returns_what_it_takes(x: Any, y: Any) -> None:
    """Raise unless what enters a layer and what leaves it have one shape and one dtype."""
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"a layer of a pipeline must return what it takes, {x.dtype} {x.shape}, got {y.dtype} {y.shape}; "
            "put what changes it before or after the layers"
        )


def _put(slots, branch: Branch, new) -> list:
    """The same slots with a new content of one."""
    return _put_at(slots, branch.chunk, _put_at(slots[branch.chunk], branch.slot, new))


def _put_at(values: list, number: int, new) -> list:
    return [*values[:number], new, *values[number + 1 :]]
