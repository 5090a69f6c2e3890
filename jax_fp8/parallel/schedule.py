"""What a schedule of a pipeline is: a value that says which unit of work each stage does in each tick.

    Schedule, a table tick x stage ─make_ticks (parallel/ticks.py)→ what the step on a mesh with `pipe` reads

A pipeline splits the layers of a model over stages, and a batch into microbatches. In a tick a stage does at most one
unit: the forward of a microbatch, its backward, or half of its backward. The input gradient is the half that the stage
before waits for. Nobody waits for the weight gradient, so it may run later.

All stages meet at the end of a tick, for there they send: activations to the next stage, gradients to the one before.
So what a stage sends can be used one tick later, and a tick takes as long as its longest unit.

The head of the model (the loss and its gradient) is work of all stages. When the last stage has the outputs of a group
of as many microbatches as there are stages, each stage takes one of them, at the end of that tick. So the backward of a
microbatch begins after the forwards of its whole group. The last group may be shorter.

A stage may have several chunks of layers. Chunk 0 of all stages comes first in the model, then chunk 1 of all stages:
a microbatch goes around the stages once for each chunk.

A schedule is executed when it is made, unit by unit. One that reads what is not there yet, or does a unit twice or
never, is refused, so whoever holds a Schedule need not look again.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a unit of work computes. A backward is both of its halves at once."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"


FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = Kind


@dataclass(frozen=True)
class Unit:
    """What a stage does in one tick: work of one kind, for a microbatch and a chunk of its layers."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    @property
    def parts(self) -> tuple["Unit", ...]:
        """The two halves of a backward; any other unit alone."""
        if self.kind is not BACKWARD:
            return (self,)
        halves = INPUT_GRADIENT, WEIGHT_GRADIENT
        return tuple(Unit(kind, self.microbatch, self.chunk) for kind in halves)


Cell = tuple[int, Unit]  # a stage, and what it does


@dataclass(frozen=True)
class Schedule:
    """Which unit each stage does in each tick.

    Args:
      table: `table[tick][stage]`; None where the stage is idle, in the bubble.
      microbatches: of a step.
      chunks: of layers that each stage has.
    """

    table: tuple[tuple[Unit | None, ...], ...]
    microbatches: int
    chunks: int = 1

    def __post_init__(self):
        check_counts(microbatches=self.microbatches, chunks=self.chunks)
        _check_cells(self.table)
        _check_order(self, _check_once(self))

    @property
    def stages(self) -> int:
        return len(self.table[0])

    @property
    def orders(self) -> tuple[tuple[Unit, ...], ...]:
        """The units of each stage, one after the other."""
        return tuple(tuple(unit for unit in column if unit is not None) for column in zip(*self.table, strict=True))

    def units(self) -> Iterator[tuple[int, int, Unit]]:
        """Tick, stage and unit of all the work, tick by tick."""
        for tick, row in enumerate(self.table):
            for stage, unit in enumerate(row):
                if unit is not None:
                    yield tick, stage, unit


def needs(stage: int, unit: Unit, stages: int, microbatches: int, chunks: int) -> list[Cell]:
    """What must be done before a unit: on its own stage, on the neighbour in the model, or by the head."""
    if unit.kind is WEIGHT_GRADIENT:
        return [(stage, Unit(INPUT_GRADIENT, unit.microbatch, unit.chunk))]

    def at(number, kind) -> list[Cell]:
        """The same at another number in the model, where chunk c of stage s has number c * stages + s."""
        chunk, there = divmod(number, stages)
        return [(there, Unit(kind, unit.microbatch, chunk))] if 0 <= number < stages * chunks else []

    number = unit.chunk * stages + stage
    if unit.kind is FORWARD:
        return at(number - 1, FORWARD)
    if number == stages * chunks - 1:
        group = group_of(unit.microbatch, stages, microbatches)
        return [(stage, Unit(FORWARD, m, unit.chunk)) for m in group]
    return at(number, FORWARD) + at(number + 1, INPUT_GRADIENT)


def group_of(microbatch: int, stages: int, microbatches: int) -> range:
    """The microbatches whose loss is computed together with that of this one."""
    first = microbatch - microbatch % stages
    return range(first, min(first + stages, microbatches))


def in_order(orders: Sequence[Sequence[Unit]], microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule in which each stage does its units in this order, each in the first tick in which it can.

    Stages do not wait for each other to work of one kind. Where a forward and a backward share a tick, the stage with
    the forward is idle until the backward ends.

    Args:
      orders: the units of each stage.
      microbatches, chunks: as of a `Schedule`.
    """
    stages = len(orders)
    columns: list[list[Unit | None]] = [[] for _ in orders]
    left = {stage: [*order] for stage, order in enumerate(orders) if order}
    done: dict[Cell, int] = {}

    def needed(stage) -> list[Cell]:
        return needs(stage, left[stage][0], stages, microbatches, chunks)

    def missing(stage) -> list[Cell]:
        return [cell for cell in needed(stage) if cell not in done]

    def do_next(stage):
        column = columns[stage]
        first = max((done[cell] + 1 for cell in needed(stage)), default=0)
        column += [None] * (first - len(column))
        unit = left[stage].pop(0)
        done.update({(stage, part): len(column) for part in unit.parts})
        column.append(unit)

    while left:
        ready = [stage for stage in left if not missing(stage)]
        if not ready:  # the cause, rather than a stage that waits for it
            waits = [(stage, cell) for stage in left for cell in missing(stage)]
            stage, cell = min(waits, key=lambda wait: wait[0] != wait[1][0])
            raise ValueError(
                "a stage must do a unit after those that it needs, got orders in which "
                f"{_name(stage, left[stage][0])} waits forever for {_name(*cell)}; put it later, or the other one "
                "earlier"
            )
        for stage in ready:
            do_next(stage)
        left = {stage: units for stage, units in left.items() if units}
    ticks = max(map(len, columns), default=0)
    table = zip(*(column + [None] * (ticks - len(column)) for column in columns), strict=True)
    return Schedule(tuple(table), microbatches, chunks)


def check_counts(**counts: int) -> None:
    """Raise unless all of these are whole numbers from 1."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number from 1, got {count!r}; pass {name}=1 or more")


def _check_cells(table):
    """Raise unless there is a cell for each tick and stage, with one unit or None."""
    widths = {len(row) for row in table}
    if len(widths) != 1 or widths == {0}:
        raise ValueError(
            f"a table must have ticks with a cell for each stage, got rows of {sorted(widths)} cells; pass None where "
            "a stage is idle"
        )
    for tick, row in enumerate(table):
        for stage, cell in enumerate(row):
            if cell is not None and not isinstance(cell, Unit):
                raise ValueError(
                    f"a stage must do one Unit in a tick, or None, got {cell!r} on stage {stage} in tick {tick}; give "
                    "each unit a tick of its own"
                )


def _check_once(schedule) -> dict[Cell, int]:
    """Raise unless each stage does each forward and both halves of each backward once; returns in which ticks."""
    done: dict[Cell, int] = {}
    for tick, stage, unit in schedule.units():
        for part in unit.parts:
            cell = stage, part
            if cell in done:
                raise ValueError(
                    f"a stage must do each unit once, got {_name(*cell)} in tick {done[cell]} and in tick {tick}; "
                    "take one of them out"
                )
            done[cell] = tick
    wanted = {
        (stage, Unit(kind, microbatch, chunk)): None
        for stage in range(schedule.stages)
        for microbatch in range(schedule.microbatches)
        for chunk in range(schedule.chunks)
        for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
    }
    sizes = f"of {schedule.microbatches} microbatches and chunks={schedule.chunks}"
    for cell in wanted:
        if cell not in done:
            raise ValueError(f"a schedule {sizes} must do {_name(*cell)}, got it in no tick; add it")
    for cell, tick in done.items():
        if cell not in wanted:
            raise ValueError(f"a schedule {sizes} has no {_name(*cell)[4:]}, got it in tick {tick}; take it out")
    return done


def _check_order(schedule, done):
    """Raise unless each unit comes in a tick after those that it needs."""
    for tick, stage, unit in schedule.units():
        for cell in needs(stage, unit, schedule.stages, schedule.microbatches, schedule.chunks):
            if tick <= done[cell]:
                raise ValueError(
                    f"{_name(stage, unit)} must be in tick {done[cell] + 1} or later, after {_name(*cell)} in tick "
                    f"{done[cell]}, got tick {tick}; move it"
                )


def _name(stage, unit) -> str:
    return f"the {unit.kind.value} of microbatch {unit.microbatch} (stage {stage}, chunk {unit.chunk})"
