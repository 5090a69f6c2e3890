"""The schedules of a pipeline, by name.

    stages, microbatches, chunks ─one function each→ ticks of forwards, ticks of backwards ─→ Schedule

    gpipe         all forwards, then all backwards          keeps the activations of all microbatches
    1f1b          each backward as early as possible        the same bubble, keeps 3 * stages - 2 microbatches at most
    interleaved   1f1b, each stage with several chunks      a smaller bubble, keeps less, sends more often
    zero-bubble   1f1b with delayed weight gradients        a third of the bubble if all three kinds take equally long

A tick takes as long as its longest unit, so in a tick all stages do units of one kind. Each schedule begins with two
lanes: the ticks of its forwards alone, and the ticks of its backwards alone. In a lane all stages do their units in the
same order, and a stage begins one tick after the stage that it waits for. Then the lanes are merged, with each tick of
backwards as early as possible: when the losses of its group are there.

In the 1F1B of the papers a stage does forwards while its neighbours do backwards. Here every tick would then take as
long as a backward, and the step a third longer. Ticks of one kind cost memory instead. When the last stage has finished
a group, stage 0 has begun `stages - 1` microbatches of the next group, and still waits for the backwards of as many of
the group before. So stage 0 keeps 3 * stages - 2 microbatches, and stage s 2 * s fewer; in the papers stage s keeps
stages - s.

`parallel/timeline.py` computes what each costs. To add a schedule, write one more function, and a line in SCHEDULES.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from jax_fp8.parallel.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Kind,
    Schedule,
    Unit,
    check_counts,
    needs,
)

Row = tuple[Unit | None, ...]  # a tick: the unit of each stage


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards (https://arxiv.org/abs/1811.06965), in the same order.

    Backwards in the opposite order would need as much memory and have the same bubble. In this order gradients are
    added up as in all other schedules, and have the same bits.
    """
    _check_sizes(stages, microbatches)
    _check_one_chunk("gpipe", chunks)
    forwards = [Unit(FORWARD, m) for m in range(microbatches)]
    backwards = [Unit(BACKWARD, m) for m in range(microbatches)]
    return Schedule((*_down(forwards, stages), *_up(backwards, stages)), microbatches)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All backwards that are possible, then forwards until there are more (https://arxiv.org/abs/2104.04473)."""
    _check_sizes(stages, microbatches)
    _check_one_chunk("1f1b", chunks)
    forwards = [Unit(FORWARD, m) for m in range(microbatches)]
    backwards = [Unit(BACKWARD, m) for m in range(microbatches)]
    return Schedule(_merged(_down(forwards, stages), _up(backwards, stages), microbatches), microbatches)


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B of chunks (https://arxiv.org/abs/2104.04473): the bubble is shorter, since a chunk takes less time. For the
    same reason stages keep less: only chunk 0 has microbatches of three groups at a time.

    A group of as many microbatches as there are stages goes through one chunk, then through the next. It comes back to
    stage 0 just when stage 0 has sent its last microbatch. So `stages` must divide `microbatches`.
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

    def in_groups(kind: Kind, order_of_chunks: range) -> list[Unit]:
        groups = [range(first, first + stages) for first in range(0, microbatches, stages)]
        return [Unit(kind, m, chunk) for group in groups for chunk in order_of_chunks for m in group]

    forwards = _down(in_groups(FORWARD, range(chunks)), stages)
    backwards = _up(in_groups(BACKWARD, range(chunks)[::-1]), stages)
    return Schedule(_merged(forwards, backwards, microbatches, chunks), microbatches, chunks)


def zero_bubble(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B with the two halves of a backward apart, after ZB-H1 (https://arxiv.org/abs/2401.10241).

    Input gradients take the place of the backwards in their lane. A stage does weight gradients when it would be idle,
    as long as no stage keeps more than 3 * stages - 2 microbatches, as many as stage 0 of 1F1B. With at least that many
    microbatches, every stage hides `stages - 1` weight gradients beside longer units of other stages; for more there is
    no memory.
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
    """The schedule with this name in SCHEDULES."""
    if name not in [*SCHEDULES]:
        raise ValueError(f"a schedule must be one of {', '.join(SCHEDULES)}, got {name!r}; choose one of these")
    return SCHEDULES[name](stages, microbatches, chunks)


def layers_of_stage(stage: int, num_layers: int, stages: int, chunks: int = 1) -> tuple[range, ...]:
    """The numbers of a stage's layers, a range for each of its chunks."""
    check_counts(num_layers=num_layers, stages=stages, chunks=chunks)
    if stage not in range(stages):
        raise ValueError(f"stage must be among 0 to {stages - 1}, got {stage!r}; pass one of these")
    size, remainder = divmod(num_layers, stages * chunks)
    if remainder:
        raise ValueError(
            f"all chunks of all stages must have the same number of layers, got {num_layers} layers for {stages} "
            f"stages with {chunks} chunks each; pass a multiple of {stages * chunks} layers, or other stages"
        )
    first = [size * (chunk * stages + stage) for chunk in range(chunks)]
    return tuple(range(begin, begin + size) for begin in first)


def _down(order: list[Unit], stages: int) -> list[Row]:
    """The ticks in which all stages do these units, each stage one tick after the previous stage."""
    return _lane(order, range(stages))


def _up(order: list[Unit], stages: int) -> list[Row]:
    """The ticks in which all stages do these units, each stage one tick after the next stage."""
    return _lane(order, range(stages)[::-1])


def _lane(order: list[Unit], begins: range) -> list[Row]:
    """The ticks in which each stage does these units, beginning in its own tick."""
    columns = [[*[None] * begin, *order, *[None] * (max(begins) - begin)] for begin in begins]
    return [*zip(*columns, strict=True)]


def _merged(forwards: list[Row], backwards: list[Row], microbatches: int, chunks: int = 1) -> tuple[Row, ...]:
    """Both lanes, with each tick of backwards as soon as its units have what they need: so stages keep little."""
    stages = len(forwards[0])
    ticks = {(stage, unit): tick for tick, stage, unit in _units(forwards)}

    def last_needed(row: Row) -> int:
        """The last tick of forwards that these backwards wait for."""
        needed = [cell for _, stage, unit in _units([row]) for cell in needs(stage, unit, stages, microbatches, chunks)]
        return max(ticks[cell] for cell in needed if cell in ticks)

    table: list[Row] = []
    waiting = deque(backwards)
    for tick, row in enumerate(forwards):
        table.append(row)
        while waiting and last_needed(waiting[0]) <= tick:
            table.append(waiting.popleft())
    return tuple(table)


def _with_weight_gradients(rows: tuple[Row, ...], most: int) -> tuple[Row, ...]:
    """These ticks, with the weight gradient of each input gradient where a stage is idle.

    Ticks of weight gradients alone are added where a stage would otherwise keep more than `most` microbatches, and at
    the end.
    """
    table: list[Row] = []
    stages = len(rows[0])
    waiting: list[deque[Unit]] = [deque() for _ in range(stages)]
    room = [most] * stages

    def add(row: Row) -> None:
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


def _units(rows: Iterable[Row]) -> Iterator[tuple[int, int, Unit]]:
    """The tick, stage and unit of each unit in these ticks."""
    for tick, row in enumerate(rows):
        for stage, unit in enumerate(row):
            if unit is not None:
                yield tick, stage, unit


def _check_sizes(stages: int, microbatches: int) -> None:
    """Raise unless there is a microbatch for every stage."""
    check_counts(stages=stages, microbatches=microbatches)
    if microbatches < stages:
        raise ValueError(
            f"a pipeline needs as many microbatches as stages, or more, got {microbatches} microbatches for {stages} "
            f"stages; pass at least {stages} microbatches"
        )


def _check_one_chunk(name: str, chunks: int) -> None:
    if chunks != 1:
        raise ValueError(
            f"{name} has one chunk of layers on each stage, got {chunks=}; leave it out, or take interleaved"
        )
