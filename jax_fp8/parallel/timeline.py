"""What a schedule costs: the time of each unit, the bubble, and what stages keep for later.

    Schedule, Costs ─make_timeline→ Timeline: when each unit begins and ends ─┬→ bubble
                                                                              └→ str(timeline), a picture for a terminal
    Schedule ─most_kept→ for each stage the most that it keeps at a time

A tick has no length. A backward takes longer than a forward, so the time is found by running the units: each begins as
soon as its stage is free and what it needs has arrived. Stages that are to meet after every tick (`in_step`) wait for
the longest unit of the tick as well.
"""

import math
from dataclasses import dataclass

from jax_fp8.parallel.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Kind,
    Place,
    Schedule,
    Unit,
    needs,
)

_LETTERS = {FORWARD: "F", BACKWARD: "B", INPUT_GRADIENT: "B", WEIGHT_GRADIENT: "W"}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long a unit takes, for all layers of a stage and in any unit of time; a chunk takes its share.

    Args:
      forward, input_gradient, weight_gradient: of one microbatch. A backward takes the time of both its halves.
      transfer: until the result of a stage has arrived at another.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    transfer: float = 0.0

    def __post_init__(self):
        for name in ("forward", "input_gradient", "weight_gradient"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must take a time above 0, got {getattr(self, name)!r}; pass {name}=1.0")
        if not 0 <= self.transfer < math.inf:
            raise ValueError(f"transfer must take a time from 0, got {self.transfer!r}; pass transfer=0.0")

    def of(self, kind: Kind) -> float:
        if kind is BACKWARD:
            return self.input_gradient + self.weight_gradient
        return {
            FORWARD: self.forward,
            INPUT_GRADIENT: self.input_gradient,
            WEIGHT_GRADIENT: self.weight_gradient,
        }[kind]


@dataclass(frozen=True)
class Span:
    """A unit, when it begins, and when it ends."""

    unit: Unit
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each stage, one after the other."""

    stages: tuple[tuple[Span, ...], ...]

    @property
    def time(self) -> float:
        """Of all stages, from the first unit to the last."""
        return max(spans[-1].end for spans in self.stages)

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage is idle. All stages have as much work, so it is that of each."""
        busy = sum(span.end - span.begin for spans in self.stages for span in spans)
        return 1 - busy / (len(self.stages) * self.time)

    def __str__(self):
        """A line for each stage, as wide as it takes long: F, B or W and the microbatch; with chunks also a letter for
        the chunk. What takes longer goes on as `--`.
        """
        spans = [span for spans in self.stages for span in spans]
        step = min(span.end - span.begin for span in spans)
        with_chunk = any(span.unit.chunk for span in spans)
        width = max(len(_label(span.unit, with_chunk)) for span in spans)
        lines = []
        for stage, of_stage in enumerate(self.stages):
            cells = ["."] * _column(self.time, step)
            for span in of_stage:
                first, last = _column(span.begin, step), _column(span.end, step)
                cells[first:last] = [_label(span.unit, with_chunk), *["--"] * (last - first - 1)]
            lines.append(f"stage {stage}  " + " ".join(cell.ljust(width) for cell in cells).rstrip())
        return "\n".join(lines)


@dataclass(frozen=True)
class Kept:
    """The most that a stage keeps at a time. The unit is one microbatch in all layers of the stage; of a chunk it is a
    share.

    Args:
      activations: what forwards keep until the backward, or its input gradient, has read it.
      operands: what input gradients leave until the weight gradient has read it.
      microbatches: of which the stage has begun something and not yet done everything.
    """

    activations: float
    operands: float
    microbatches: float


def make_timeline(schedule: Schedule, costs: Costs | None = None, in_step: bool = False) -> Timeline:
    """When each unit runs.

    Args:
      schedule: whose orders count, and with `in_step` its ticks.
      costs: by default each of forward, input gradient and weight gradient takes a time of 1.
      in_step: no stage begins a tick before all have done the one before, as where a collective of all stages ends it.
    """
    costs = Costs() if costs is None else costs
    ends: dict[Place, float] = {}
    spans: list[list[Span]] = [[] for _ in range(schedule.stages)]
    last_tick, tick_begins, last_end = 0, 0.0, 0.0
    for tick, stage, unit in schedule.units():
        if tick != last_tick:
            last_tick, tick_begins = tick, last_end
        needed = needs(stage, unit, schedule.stages, schedule.chunks)
        arrived = [ends[place] + (costs.transfer if place[0] != stage else 0.0) for place in needed]
        free = [span.end for span in spans[stage][-1:]] + [tick_begins] * in_step
        begin = max([0.0, *arrived, *free])
        end = begin + costs.of(unit.kind) / schedule.chunks
        last_end = max(last_end, end)
        spans[stage].append(Span(unit, begin, end))
        ends.update({(stage, part): end for part in unit.parts})
    return Timeline(tuple(map(tuple, spans)))


def most_kept(schedule: Schedule) -> tuple[Kept, ...]:
    """The most that each stage keeps at a time. A unit still holds what it reads, and holds already what it leaves."""
    return tuple(_most_kept_by(order, schedule.chunks) for order in schedule.orders)


def _most_kept_by(order, chunks) -> Kept:
    activations = operands = microbatches = 0
    most = Kept(0, 0, 0)
    for unit in order:
        activations += unit.kind is FORWARD
        microbatches += unit.kind is FORWARD
        operands += unit.kind is INPUT_GRADIENT
        most = Kept(
            max(most.activations, activations), max(most.operands, operands), max(most.microbatches, microbatches)
        )
        activations -= unit.kind in (BACKWARD, INPUT_GRADIENT)
        operands -= unit.kind is WEIGHT_GRADIENT
        microbatches -= unit.kind in (BACKWARD, WEIGHT_GRADIENT)
    return Kept(most.activations / chunks, most.operands / chunks, most.microbatches / chunks)


def _label(unit, with_chunk) -> str:
    chunk = chr(ord("a") + unit.chunk) if with_chunk else ""
    return f"{_LETTERS[unit.kind]}{unit.microbatch}{chunk}"


def _column(time, step) -> int:
    """The nearest; halves go up, so that what takes a step or more has a column of its own."""
    return math.floor(time / step + 0.5)
