"""What a schedule of a pipeline is: a value that says which unit of work each stage does in each tick.

    Schedule, a table tick x stage ─make_ticks (parallel/ticks.py)→ what the step on a mesh with `pipe` reads

A pipeline splits the layers of a model over stages, and a batch into microbatches. In a tick a stage does at most one
unit: the forward of a microbatch, its backward, or half of its backward. The previous stage waits for the half that
computes the input gradient. Nobody waits for the weight gradient, so it may run later.

All stages synchronize at the end of a tick, when they send activations to the next stage and gradients to the previous
one. So a stage can use what it receives one tick later, and a tick takes as long as its longest unit.

All stages share the work of the model's head, the loss and its gradient. Microbatches form groups of as many as there
are stages. When the last stage has the outputs of a group, each stage takes one of them, at the end of that tick. So
the backward of a microbatch begins after the forwards of its whole group. The last group may be shorter.

A stage may have several chunks of layers. Chunk 0 of all stages comes first in the model, then chunk 1 of all stages:
a microbatch goes around the stages once for each chunk.

The constructor of a Schedule executes it, unit by unit. It refuses a schedule in which a unit needs the result of a
later one, or a unit is done twice or never. So every Schedule that exists can run.
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


Cell = tuple[int, Unit]  # a stage and its unit


@dataclass(frozen=True)
class Schedule:
    """Which unit each stage does in each tick.

    Args:
      table: `table[tick][stage]`; None where the stage is idle, in the bubble.
      microbatches: how many a step has.
      chunks: how many chunks of layers each stage has.
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
        """The tick, stage and unit of each unit of the schedule, tick by tick."""
        for tick, row in enumerate(self.table):
            for stage, unit in enumerate(row):
                if unit is not None:
                    yield tick, stage, unit


def needs(stage: int, unit: Unit, stages: int, microbatches: int, chunks: int) -> list[Cell]:
    """The units that must be done before this one: on its own stage, on a neighbouring one, or for the head."""
    if unit.kind is WEIGHT_GRADIENT:
        return [(stage, Unit(INPUT_GRADIENT, unit.microbatch, unit.chunk))]

    def at(number: int, kind: Kind) -> list[Cell]:
        """This microbatch's unit in another chunk of the model; chunk c of stage s has the number c * stages + s."""
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
    """The microbatches of the group of this one: their losses are computed in one tick."""
    first = microbatch - microbatch % stages
    return range(first, min(first + stages, microbatches))


def in_order(orders: Sequence[Sequence[Unit]], microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule in which each stage does its units in this order, each in the first tick in which it can.

    Forwards and backwards may share a tick. Then the stages with a forward are idle until the backwards end.

    Args:
      orders: the units of each stage.
      microbatches, chunks: those of the `Schedule`.
    """
    stages = len(orders)
    columns: list[list[Unit | None]] = [[] for _ in orders]
    remaining = {stage: [*order] for stage, order in enumerate(orders) if order}
    done: dict[Cell, int] = {}

    def needed(stage: int) -> list[Cell]:
        return needs(stage, remaining[stage][0], stages, microbatches, chunks)

    def missing(stage: int) -> list[Cell]:
        return [cell for cell in needed(stage) if cell not in done]

    def do_next(stage: int) -> None:
        column = columns[stage]
        first = max((done[cell] + 1 for cell in needed(stage)), default=0)
        column += [None] * (first - len(column))
        unit = remaining[stage].pop(0)
        done.update({(stage, part): len(column) for part in unit.parts})
        column.append(unit)

    while remaining:
        ready = [stage for stage in remaining if not missing(stage)]
        if not ready:  # name a stage that waits for itself, the cause, rather than one that waits for another stage
            waits = [(stage, cell) for stage in remaining for cell in missing(stage)]
            stage, cell = min(waits, key=lambda wait: wait[0] != wait[1][0])
            raise ValueError(
                "a stage must do a unit after those that it needs, got orders in which "
                f"{_name(stage, remaining[stage][0])} waits forever for {_name(*cell)}; put it later, or the other one "
                "earlier"
            )
        for stage in ready:
            do_next(stage)
        remaining = {stage: units for stage, units in remaining.items() if units}
    ticks = max(map(len, columns), default=0)
    table = zip(*(column + [None] * (ticks - len(column)) for column in columns), strict=True)
    return Schedule(tuple(table), microbatches, chunks)


def check_counts(**counts: int) -> None:
    """Raise unless all of these are whole numbers from 1."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number from 1, got {count!r}; pass {name}=1 or more")


def _check_cells(table: Sequence[Sequence[object]]) -> None:
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


def _check_once(schedule: Schedule) -> dict[Cell, int]:
    """Raise unless each stage does each forward and both halves of each backward once. Returns their ticks."""
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


def _check_order(schedule: Schedule, done: dict[Cell, int]) -> None:
    """Raise unless each unit comes in a later tick than the units that it needs."""
    for tick, stage, unit in schedule.units():
        for cell in needs(stage, unit, schedule.stages, schedule.microbatches, schedule.chunks):
            if tick <= done[cell]:
                raise ValueError(
                    f"{_name(stage, unit)} must be in tick {done[cell] + 1} or later, after {_name(*cell)} in tick "
                    f"{done[cell]}, got tick {tick}; move it"
                )


def _name(stage: int, unit: Unit) -> str:
    return f"the {unit.kind.value} of microbatch {unit.microbatch} (stage {stage}, chunk {unit.chunk})"
