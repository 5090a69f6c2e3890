"""What a schedule costs: the time of each unit, the bubble, and how many microbatches stages keep.

    Schedule, Costs ─make_timeline→ Timeline: when each unit begins and ends ─┬→ bubble
                                                                              └→ str(timeline), a picture for a terminal
    Schedule ─most_kept→ for each stage and chunk the most microbatches that it keeps at a time

Stages synchronize at the end of every tick. So a tick takes as long as its longest unit, and a stage with a shorter one
waits. The head is not counted: all stages share its work, which takes the same time in every schedule.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax_fp8.parallel.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Kind,
    Schedule,
    Unit,
)

_LETTERS = {FORWARD: "F", BACKWARD: "B", INPUT_GRADIENT: "B", WEIGHT_GRADIENT: "W"}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long a unit takes for all layers of a stage, in any measure of time; a chunk takes its share.

    Args:
      forward, input_gradient, weight_gradient: the time for one microbatch. A backward takes as long as both halves.
      transfer: the time of sending at the end of a tick; the same for a chunk.
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

    def time_of(self, kind: Kind) -> float:
        if kind is BACKWARD:
            return self.input_gradient + self.weight_gradient
        return {
            FORWARD: self.forward,
            INPUT_GRADIENT: self.input_gradient,
            WEIGHT_GRADIENT: self.weight_gradient,
        }[kind]


@dataclass(frozen=True)
class Span:
    """A unit with its begin and end."""

    unit: Unit
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each stage, one after the other."""

    stages: tuple[tuple[Span, ...], ...]

    @property
    def time(self) -> float:
        """From the begin of the first unit to the end of the last."""
        return max(spans[-1].end for spans in self.stages)

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage is idle. All stages have the same work, so it is the same for each."""
        busy = sum(span.end - span.begin for spans in self.stages for span in spans)
        return 1 - busy / (len(self.stages) * self.time)

    def __str__(self):
        """A line for each stage: F, B or W and the microbatch, with several chunks also a letter for the chunk. A
        column is the time of the shortest unit; a longer unit continues as `--`.
        """
        spans = [span for spans in self.stages for span in spans]
        step = min(span.end - span.begin for span in spans)
        with_chunk = any(span.unit.chunk for span in spans)
        width = max(len(_label(span.unit, with_chunk)) for span in spans)
        lines = []
        for stage, own_spans in enumerate(self.stages):
            cells = ["."] * _column(self.time, step)
            for span in own_spans:
                first, last = _column(span.begin, step), _column(span.end, step)
                cells[first:last] = [_label(span.unit, with_chunk), *["--"] * (last - first - 1)]
            lines.append(f"stage {stage}  " + " ".join(cell.ljust(width) for cell in cells).rstrip())
        return "\n".join(lines)


def make_timeline(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When each unit runs; by default each of forward, input gradient and weight gradient takes a time of 1."""
    costs = Costs() if costs is None else costs
    spans: list[list[Span]] = [[] for _ in range(schedule.stages)]
    begin = 0.0
    for row in schedule.table:
        times = [0.0 if unit is None else costs.time_of(unit.kind) / schedule.chunks for unit in row]
        for own_spans, unit, time in zip(spans, row, times, strict=True):
            own_spans += [] if unit is None else [Span(unit, begin, begin + time)]
        begin += max(times) + costs.transfer
    return Timeline(tuple(map(tuple, spans)))


def most_kept(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """For each stage and each chunk, the most microbatches that it keeps at a time.

    It keeps a microbatch from its forward to its last unit, both included. All stages run one program, so each
    allocates slots for the stage that keeps the most.
    """
    return tuple(
        tuple(_most_kept_by([unit for unit in order if unit.chunk == chunk]) for chunk in range(schedule.chunks))
        for order in schedule.orders
    )


def _most_kept_by(order: Sequence[Unit]) -> int:
    kept = most = 0
    for unit in order:
        kept += unit.kind is FORWARD
        most = max(most, kept)
        kept -= unit.kind in (BACKWARD, WEIGHT_GRADIENT)
    return most


def _label(unit: Unit, with_chunk: bool) -> str:
    chunk = chr(ord("a") + unit.chunk) if with_chunk else ""
    return f"{_LETTERS[unit.kind]}{unit.microbatch}{chunk}"


def _column(time: float, step: float) -> int:
    """The nearest column. Halves are rounded up, so that a unit of one step or more has a column of its own."""
    return math.floor(time / step + 0.5)
