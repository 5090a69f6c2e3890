"""A schedule as arrays of small numbers, a row for each tick: the step on a mesh with `pipe` reads these.

    Schedule ─make_ticks→ Ticks: which branch each stage takes, for which microbatch, and where its data are

The step is one program for all stages. In each tick a stage takes one of the compiled branches. A branch is a kind of
unit, a chunk, and a slot: the memory for what a forward keeps for the backward. A stage holds the slot of a microbatch
from its forward to its last unit, and takes the free slot with the lowest number.

An array that arrives at the end of a tick waits in a place of an inbox until a unit reads it. There are two inboxes:
for activations from the previous stage, and for gradients from the next one. The stages are a ring: what the last stage
sends arrives at stage 0, for its next chunk.
"""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from jax_fp8.parallel.schedule import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Cell, Kind, Schedule, Unit, needs

Key = TypeVar("Key", bound=tuple[Hashable, Hashable])  # where something is kept, and what it is
Interval = tuple[int, int]  # the tick that takes a place, and the first tick that can take it again


@dataclass(frozen=True)
class Branch:
    """What a stage does in a tick, apart from the microbatch: each branch is compiled."""

    kind: Kind
    chunk: int
    slot: int


@dataclass(frozen=True, eq=False)
class Ticks:
    """A schedule as arrays; all but `loss` are int32[ticks, stages].

    Args:
      branches: all that occur, slot by slot. In `branch`, 0 means idle, and i + 1 means `branches[i]`.
      branch, microbatch: what a stage does, and for which microbatch; 0 where it is idle.
      taken: the place of the inbox that the unit reads. A forward reads the inbox of activations, a backward or an
        input gradient that of gradients. 0 where a unit reads none: the forward of the model's first chunk, the
        backward of its last one, and weight gradients.
      put_activation, put_gradient: the place of the inbox for the array that arrives at the end of the tick. Where no
        unit reads it, this is `places`, one past the last.
      loss: int32[ticks], the group whose loss is computed at the end of the tick; -1 for none.
      slots: for each chunk, the most slots that a stage needs.
      places: how many places each inbox has.
    """

    branches: tuple[Branch, ...]
    branch: np.ndarray
    microbatch: np.ndarray
    taken: np.ndarray
    put_activation: np.ndarray
    put_gradient: np.ndarray
    loss: np.ndarray
    slots: tuple[int, ...]
    places: int


def make_ticks(schedule: Schedule) -> Ticks:
    """The arrays of a schedule."""
    ticks = {(stage, part): tick for tick, stage, unit in schedule.units() for part in unit.parts}
    slots, mail = _slots(ticks), _mail(schedule, ticks)
    branches = {
        (tick, stage): Branch(unit.kind, unit.chunk, slots[(stage, unit.chunk), unit.microbatch])
        for tick, stage, unit in schedule.units()
    }
    kinds = sorted(set(branches.values()), key=lambda branch: (branch.chunk, branch.slot, [*Kind].index(branch.kind)))
    places = 1 + max((letter.place for letter in mail), default=0)

    def array(values: Mapping[tuple[int, int], int], otherwise: int = 0) -> np.ndarray:
        whole = np.full((len(schedule.table), schedule.stages), otherwise, np.int32)
        for tick_and_stage, value in values.items():
            whole[tick_and_stage] = value
        return whole

    def put(kind: Kind) -> np.ndarray:
        of_kind = [letter for letter in mail if letter.kind is kind]
        return array({(letter.sent, letter.stage): letter.place for letter in of_kind}, places)

    return Ticks(
        branches=tuple(kinds),
        branch=array({where: kinds.index(branch) + 1 for where, branch in branches.items()}),
        microbatch=array({(tick, stage): unit.microbatch for tick, stage, unit in schedule.units()}),
        taken=array({(letter.read, letter.stage): letter.place for letter in mail}),
        put_activation=put(FORWARD),
        put_gradient=put(INPUT_GRADIENT),
        loss=_losses(schedule, ticks),
        slots=tuple(
            1 + max(branch.slot for branch in kinds if branch.chunk == chunk) for chunk in range(schedule.chunks)
        ),
        places=places,
    )


@dataclass(frozen=True)
class _Letter:
    """An array that one stage sends to another: the kind of unit that reads it, the stage that receives it, the ticks
    of both, and its place in the inbox.
    """

    kind: Kind
    stage: int
    sent: int
    read: int
    place: int


def _slots(ticks: dict[Cell, int]) -> dict[tuple[tuple[int, int], int], int]:
    """The slot of each microbatch in each chunk of a stage."""
    held = {
        ((stage, unit.chunk), unit.microbatch): (
            ticks[stage, Unit(FORWARD, unit.microbatch, unit.chunk)],
            ticks[stage, Unit(WEIGHT_GRADIENT, unit.microbatch, unit.chunk)] + 1,
        )
        for stage, unit in ticks
    }
    return _lowest_free(held)


def _mail(schedule: Schedule, ticks: dict[Cell, int]) -> list[_Letter]:
    """All arrays that a unit reads from a neighbour: these are the results of units of its own kind."""
    held = {
        ((stage, unit.kind), unit): (ticks[cell], ticks[stage, unit])
        for stage, unit in ticks
        for cell in needs(stage, unit, schedule.stages, schedule.microbatches, schedule.chunks)
        if cell[1].kind is unit.kind
    }
    return [_Letter(key[0][1], key[0][0], *held[key], place) for key, place in _lowest_free(held).items()]


def _lowest_free(held: dict[Key, Interval]) -> dict[Key, int]:
    """A number for each key: the lowest that is free at its place in its interval."""
    free_from: defaultdict[Hashable, int] = defaultdict(int)
    numbers: dict[Key, int] = {}
    for key, (begin, end) in sorted(held.items(), key=lambda item: item[1]):
        number = next(number for number in itertools.count() if free_from[key[0], number] <= begin)
        free_from[key[0], number] = end
        numbers[key] = number
    return numbers


def _losses(schedule: Schedule, ticks: dict[Cell, int]) -> np.ndarray:
    """For each tick the group whose last output the last stage computes in it, or -1."""
    groups = np.full(len(schedule.table), -1, np.int32)
    last = schedule.stages - 1
    for first in range(0, schedule.microbatches, schedule.stages):
        group = range(first, min(first + schedule.stages, schedule.microbatches))
        done = max(ticks[last, Unit(FORWARD, microbatch, schedule.chunks - 1)] for microbatch in group)
        groups[done] = first // schedule.stages
    return groups
