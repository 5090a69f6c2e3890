"""The schedules of a pipeline that exist, by name. Nothing runs them yet.

    stages, microbatches, chunks ─one function each→ the order of each stage ─in_order→ Schedule

    gpipe         all forwards, then all backwards          keeps the activations of all microbatches
    1f1b          a backward as soon as there is one        the same bubble, keeps those of `stages` at most
    interleaved   1f1b, each stage with several chunks      a smaller bubble, keeps more, sends more often
    zero-bubble   1f1b with delayed weight gradients        a third of the bubble if all three kinds take equally long

What each costs is in `parallel/timeline.py`. A new schedule is one more function, and a line in SCHEDULES.
"""

from collections.abc import Callable

from jax_fp8.parallel.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Schedule,
    Unit,
    check_counts,
    in_order,
)


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards, the last microbatch first (https://arxiv.org/abs/1811.06965).

    So what forwards keep is a stack: the last that was put on it is the first that is needed. A stack needs no ring of
    buffers and no choice of a slot; the backward of a loop is this already. The last stage goes on with what it has
    just computed, and the bubble is the same in either order.
    """
    check_counts(stages=stages, microbatches=microbatches)
    _check_one_chunk("gpipe", chunks)
    forwards = [Unit(FORWARD, m) for m in range(microbatches)]
    backwards = [Unit(BACKWARD, m) for m in reversed(range(microbatches))]
    return in_order([forwards + backwards] * stages, microbatches)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """A backward as soon as there is one, then a forward, in turn (https://arxiv.org/abs/2104.04473).

    Stage s warms up with as many forwards as there are stages behind it. So no more than `stages - s` microbatches are
    between their forward and their backward.
    """
    check_counts(stages=stages, microbatches=microbatches)
    _check_one_chunk("1f1b", chunks)
    forwards = [Unit(FORWARD, m) for m in range(microbatches)]
    backwards = [[Unit(BACKWARD, m)] for m in range(microbatches)]
    return in_order([_in_turn(stages - 1 - s, forwards, backwards) for s in range(stages)], microbatches)


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B of chunks (https://arxiv.org/abs/2104.04473): the bubble is shorter, since a chunk takes less time.

    Microbatches pass in groups of as many as there are stages: a group goes through one chunk, then through the next,
    and is back at stage 0 just when this has sent on the last of the group. So `stages` must divide `microbatches`.
    """
    check_counts(stages=stages, microbatches=microbatches, chunks=chunks)
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

    forwards = in_groups(FORWARD, range(chunks))
    backwards = [[unit] for unit in in_groups(BACKWARD, range(chunks)[::-1])]
    # The way of the first microbatch to its last chunk, and twice the way to the last stage. Once would make the same
    # bubble if transfers took no time, and keep less; the second way is what transfers are hidden under.
    warmup = [stages * (chunks - 1) + 2 * (stages - 1 - s) for s in range(stages)]
    return in_order([_in_turn(count, forwards, backwards) for count in warmup], microbatches, chunks)


def zero_bubble(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """ZB-H1 (https://arxiv.org/abs/2401.10241): 1F1B with the two halves of a backward apart.

    The input gradients go to the stage before without waiting for weight gradients. Stage s runs its weight gradients s
    microbatches late, which fills the end, where 1F1B is idle. So no stage has begun more than `stages` microbatches
    that are not finished, as the first one of 1F1B.
    """
    check_counts(stages=stages, microbatches=microbatches)
    _check_one_chunk("zero-bubble", chunks)
    forwards = [Unit(FORWARD, m) for m in range(microbatches)]

    def halves(late) -> list[list[Unit]]:
        """Each input gradient, and with it the weight gradient of an earlier microbatch."""
        pairs = [(Unit(INPUT_GRADIENT, m), Unit(WEIGHT_GRADIENT, m - late)) for m in range(microbatches + late)]
        return [[unit for unit in pair if unit.microbatch in range(microbatches)] for pair in pairs]

    orders = [_in_turn(stages - 1 - s, forwards, halves(s)) for s in range(stages)]
    return in_order(orders, microbatches)


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def make_schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of this name, among SCHEDULES."""
    if name not in SCHEDULES:
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


def _in_turn(warmup: int, forwards: list[Unit], backwards: list[list[Unit]]) -> list[Unit]:
    """Forwards alone for the warmup, then in turn a forward and the units of a backward, then what is left of these."""
    order, rest = forwards[:warmup], forwards[warmup:]
    for index, backward in enumerate(backwards):
        order += rest[index : index + 1] + backward
    return order


def _check_one_chunk(name, chunks):
    if chunks != 1:
        raise ValueError(
            f"{name} has one chunk of layers on each stage, got {chunks=}; leave it out, or take interleaved"
        )
