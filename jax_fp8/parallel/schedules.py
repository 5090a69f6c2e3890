"""The schedules of a pipeline that exist, by name.

    stages, microbatches, chunks ─one function each→ ticks of forwards, ticks of backwards ─→ Schedule

    gpipe         all forwards, then all backwards          keeps the activations of all microbatches
    1f1b          backwards as soon as there are some       the same bubble, keeps 3 * stages - 2 microbatches at most
    interleaved   1f1b, each stage with several chunks      a smaller bubble, keeps less, sends more often
    zero-bubble   1f1b with delayed weight gradients        a third of the bubble if all three kinds take equally long

A tick takes as long as its longest unit, so in a tick all stages do work of one kind. A schedule is made of two lanes:
the ticks of its forwards and those of its backwards, as if there were nothing else. In a lane all stages do their units
in one order, and a stage begins one tick after the stage that it waits for. Then the lanes are merged, and each tick of
backwards stands as early as it can: when a group has its loss.

In the 1F1B of the papers a stage does forwards while its neighbours do backwards. Here every tick would take as long as
a backward, and the step a third longer. The price of common ticks is memory. When the last stage has finished a group,
stage 0 has begun `stages - 1` microbatches of the next one, and still waits for the backwards of as many of the one
before. So it keeps 3 * stages - 2, and stage s two less for each stage before it, in place of stages - s.

What each costs is in `parallel/timeline.py`. A new schedule is one more function, and a line in SCHEDULES.
"""

from collections import deque
from collections.abc import Callable

from jax_fp8.parallel.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Schedule,
    Unit,
    check_counts,
    needs,
)

Row = tuple[Unit | None, ...]  # a tick: what each stage does


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards (https://arxiv.org/abs/1811.06965), in the same order.

    The last microbatch first would keep as much, for here what a forward keeps has a place of its own, and the bubble
    would be the same. In this order gradients are added up as by all other schedules, and have the same bits.
    """
    _check_sizes(stages, microbatches)
    _check_one_chunk("gpipe", chunks)
    forwards = [Unit(FORWARD, m) for m in range(microbatches)]
    backwards = [Unit(BACKWARD, m) for m in range(microbatches)]
    return Schedule((*_down(forwards, stages), *_up(backwards, stages)), microbatches)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """As many backwards as there are, then forwards until there are more (https://arxiv.org/abs/2104.04473)."""
    _check_sizes(stages, microbatches)
    _check_one_chunk("1f1b", chunks)
    forwards = [Unit(FORWARD, m) for m in range(microbatches)]
    backwards = [Unit(BACKWARD, m) for m in range(microbatches)]
    return Schedule(_merged(_down(forwards, stages), _up(backwards, stages), microbatches), microbatches)


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B of chunks (https://arxiv.org/abs/2104.04473): the bubble is shorter, since a chunk takes less time. For the
    same reason less is kept: only chunk 0 has microbatches of three groups at a time.

    Microbatches pass in groups of as many as there are stages: a group goes through one chunk, then through the next,
    and is back at stage 0 just when this has sent on the last of the group. So `stages` must divide `microbatches`.
    """
    _check_sizes(stages, microbatches)
    check_counts(chunks=chunks)
    if chunks == 1:
        raise ValueError("interleaved needs several chunks on each stage, got chunks=1; pass chunks=2, or take 1f1b")
    if microbatches % stages:
        raise ValueError(
            f"interleaved needs as many microbatches as stages, or a multiple, got {microbatches} microbatches for "
            f"{stages} stages; pass {-(-microbatches // stages) * stages} microbatches"
        )

    def in_groups(kind, order_of_chunks) -> list[Unit]:
        groups = [range(first, first + stages) for first in range(0, microbatches, stages)]
        return [Unit(kind, m, chunk) for group in groups for chunk in order_of_chunks for m in group]

    forwards = _down(in_groups(FORWARD, range(chunks)), stages)
    backwards = _up(in_groups(BACKWARD, range(chunks)[::-1]), stages)
    return Schedule(_merged(forwards, backwards, microbatches, chunks), microbatches, chunks)


def zero_bubble(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B with the two halves of a backward apart, after ZB-H1 (https://arxiv.org/abs/2401.10241).

    Input gradients are in the lane of the backwards. Weight gradients are put off until a stage would be idle, as long
    as no stage keeps more than 3 * stages - 2 microbatches, as stage 0 of 1F1B does. From that many microbatches on,
    every stage hides `stages - 1` weight gradients beside longer work of others, and there is no room for more.
    """
    _check_sizes(stages, microbatches)
    _check_one_chunk("zero-bubble", chunks)
    forwards = [Unit(FORWARD, m) for m in range(microbatches)]
    gradients = [Unit(INPUT_GRADIENT, m) for m in range(microbatches)]
    rows = _merged(_down(forwards, stages), _up(gradients, stages), microbatches)
    return Schedule(_with_weight_gradients(rows, 3 * stages - 2), microbatches)


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def make_schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of this name, among SCHEDULES."""
    if name not in [*SCHEDULES]:
        raise ValueError(f"a schedule must be one of {', '.join(SCHEDULES)}, got {name!r}; choose one of these")
    return SCHEDULES[name](stages, microbatches, chunks)


def layers_of_stage(stage: int, num_layers: int, stages: int, chunks: int = 1) -> tuple[range, ...]:
    """The numbers of the layers that a stage has, a range for each of its chunks."""
    check_counts(num_layers=num_layers, stages=stages, chunks=chunks)
    if stage not in range(stages):
        raise ValueError(f"stage must be among 0 to {stages - 1}, got {stage!r}; pass one of these")
    size, left = divmod(num_layers, stages * chunks)
    if left:
        raise ValueError(
            f"each chunk of each stage must have as many layers, got {num_layers} layers for {stages} stages with "
            f"{chunks} chunks each; pass a multiple of {stages * chunks} layers, or other stages"
        )
    first = [size * (chunk * stages + stage) for chunk in range(chunks)]
    return tuple(range(begin, begin + size) for begin in first)


def _down(order: list[Unit], stages: int) -> list[Row]:
    """The ticks in which all stages do these units, each stage one tick after the stage before."""
    return _lane(order, range(stages))


def _up(order: list[Unit], stages: int) -> list[Row]:
    """The ticks in which all stages do these units, each stage one tick after the stage behind."""
    return _lane(order, range(stages)[::-1])


def _lane(order, begins) -> list[Row]:
    """The ticks in which each stage does these units, from a tick of its own on."""
    columns = [[None] * begin + order + [None] * (max(begins) - begin) for begin in begins]
    return [*zip(*columns, strict=True)]


def _merged(forwards: list[Row], backwards: list[Row], microbatches: int, chunks: int = 1) -> tuple[Row, ...]:
    """Both, each tick of backwards as soon as its units find what they need: so stages keep as little as they can."""
    stages = len(forwards[0])
    ticks = {(stage, unit): tick for tick, stage, unit in _units(forwards)}

    def last_needed(row) -> int:
        """The last tick of forwards that these backwards wait for."""
        needed = [
            place for _, stage, unit in _units([row]) for place in needs(stage, unit, stages, microbatches, chunks)
        ]
        return max(ticks[place] for place in needed if place in ticks)

    table: list[Row] = []
    waiting = deque(backwards)
    for tick, row in enumerate(forwards):
        table.append(row)
        while waiting and last_needed(waiting[0]) <= tick:
            table.append(waiting.popleft())
    return tuple(table)


def _with_weight_gradients(rows: tuple[Row, ...], most: int) -> tuple[Row, ...]:
    """These ticks, with the weight gradient of each input gradient where a stage is idle.

    Ticks of weight gradients alone come where a stage would otherwise keep more than `most` microbatches, and last.
    """
    table: list[Row] = []
    stages = len(rows[0])
    waiting: list[deque[Unit]] = [deque() for _ in range(stages)]
    room = [most] * stages

    def add(row):
        table.append(tuple(unit or (late.popleft() if late else None) for unit, late in zip(row, waiting, strict=True)))
        for _, stage, unit in _units(table[-1:]):
            room[stage] += (unit.kind is WEIGHT_GRADIENT) - (unit.kind is FORWARD)
            if unit.kind is INPUT_GRADIENT:
                waiting[stage].append(Unit(WEIGHT_GRADIENT, unit.microbatch))

    idle = (None,) * stages
    for row in rows:
        while any(waiting) and any(unit.kind is FORWARD and not room[stage] for _, stage, unit in _units([row])):
            add(idle)
        add(row)
    while any(waiting):
        add(idle)
    return tuple(table)


def _units(rows):
    """Tick, stage and unit of all the work in these ticks."""
    for tick, row in enumerate(rows):
        for stage, unit in enumerate(row):
            if unit is not None:
                yield tick, stage, unit


def _check_sizes(stages, microbatches):
    """Raise unless every stage can have a microbatch of its own."""
    check_counts(stages=stages, microbatches=microbatches)
    if microbatches < stages:
        raise ValueError(
            f"a pipeline needs as many microbatches as stages, or more, got {microbatches} microbatches for {stages} "
            f"stages; pass at least {stages} microbatches"
        )


def _check_one_chunk(name, chunks):
    if chunks != 1:
        raise ValueError(
            f"{name} has one chunk of layers on each stage, got {chunks=}; leave it out, or take interleaved"
        )
