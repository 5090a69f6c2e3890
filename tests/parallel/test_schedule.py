"""A schedule is a table that can be run as it stands: broken ones are refused, by the unit that breaks them."""

import dataclasses
import re

import pytest

from jax_fp8.parallel.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Schedule,
    Unit,
    group_of,
    in_order,
    needs,
)
from jax_fp8.parallel.schedules import make_schedule

F0, F1, B0, B1 = (Unit(kind, m) for kind in (FORWARD, BACKWARD) for m in (0, 1))
I0, W0 = Unit(INPUT_GRADIENT, 0), Unit(WEIGHT_GRADIENT, 0)

# Two microbatches on two stages, a row for each tick; and one microbatch with halves.
TABLE = (
    (F0, None),
    (F1, F0),
    (None, F1),
    (None, B0),
    (B0, B1),
    (B1, None),
)
HALVES = ((F0, None), (None, F0), (None, I0), (I0, W0), (W0, None))
# One microbatch, two stages with two chunks each.
CHUNKS = tuple(
    (Unit(kind, 0, chunk), None) if stage == 0 else (None, Unit(kind, 0, chunk))
    for kind, chunk, stage in [
        *((FORWARD, chunk, stage) for chunk in (0, 1) for stage in (0, 1)),
        *((BACKWARD, chunk, stage) for chunk in (1, 0) for stage in (1, 0)),
    ]
)


def changed(table, **cells):
    """The table with other cells: `t2s0=F0` is tick 2 of stage 0."""
    rows = [[*row] for row in table]
    for name, unit in cells.items():
        tick, stage = map(int, re.findall(r"\d+", name))
        rows[tick][stage] = unit
    return tuple(map(tuple, rows))


def test_tables_that_can_run_are_taken():
    """Those that are broken below."""
    assert Schedule(TABLE, 2).orders == ((F0, F1, B0, B1),) * 2
    assert Schedule(TABLE, 2) == make_schedule("1f1b", 2, 2)
    assert Schedule(HALVES, 1).stages == 2
    assert Schedule(CHUNKS, 1, chunks=2).stages == 2


BROKEN = {
    "a forward twice": (
        lambda: Schedule(changed(TABLE, t2s0=F0), 2),
        "a stage must do each unit once, got the forward of microbatch 0 (stage 0, chunk 0) in tick 0 and in tick 2; "
        "take one of them out",
    ),
    "a backward and a half of it": (
        lambda: Schedule(changed(TABLE, t2s0=W0), 2),
        "got the weight gradient of microbatch 0 (stage 0, chunk 0) in tick 2 and in tick 4; take one",
    ),
    "a forward never": (
        lambda: Schedule(changed(TABLE, t2s1=None), 2),
        "must do the forward of microbatch 1 (stage 1, chunk 0), got it in no tick; add it",
    ),
    "a backward never": (
        lambda: Schedule(changed(TABLE, t5s0=None), 2),
        "must do the input gradient of microbatch 1 (stage 0, chunk 0), got it in no tick; add it",
    ),
    "a weight gradient never": (
        lambda: Schedule(changed(HALVES, t4s0=None), 1),
        "must do the weight gradient of microbatch 0 (stage 0, chunk 0), got it in no tick; add it",
    ),
    "too many microbatches": (
        lambda: Schedule(TABLE, 1),
        "a schedule of 1 microbatches and chunks=1 has no forward of microbatch 1 (stage 0, chunk 0), got it in tick 1",
    ),
    "too many chunks": (lambda: Schedule(CHUNKS, 1), "has no forward of microbatch 0 (stage 0, chunk 1), got it in"),
    "a forward before the one on the stage before": (
        lambda: Schedule(changed(TABLE, t0s0=None, t1s0=F0, t2s0=F1), 2),
        "the forward of microbatch 0 (stage 1, chunk 0) must be in tick 2 or later, after the forward of microbatch 0 "
        "(stage 0, chunk 0) in tick 1, got tick 1; move it",
    ),
    "a chunk before the one before on the last stage": (
        lambda: Schedule(changed(CHUNKS, t1s0=CHUNKS[2][0], t2s0=None), 1, chunks=2),
        "the forward of microbatch 0 (stage 0, chunk 1) must be in tick 2 or later, after the forward of microbatch 0 "
        "(stage 1, chunk 0) in tick 1, got tick 1",
    ),
    "a backward before the one on the stage behind": (
        lambda: Schedule(changed(TABLE, t3s0=B0, t4s0=None), 2),
        "the backward of microbatch 0 (stage 0, chunk 0) must be in tick 4 or later, after the input gradient of "
        "microbatch 0 (stage 1, chunk 0) in tick 3, got tick 3",
    ),
    "a chunk's backward before that of the next": (
        lambda: Schedule(changed(CHUNKS, t5s1=CHUNKS[6][1], t6s1=None), 1, chunks=2),
        "the backward of microbatch 0 (stage 1, chunk 0) must be in tick 6 or later, after the input gradient of "
        "microbatch 0 (stage 0, chunk 1) in tick 5, got tick 5",
    ),
    "a backward before its forward": (
        lambda: Schedule(changed(TABLE, t1s1=B0, t2s1=F0, t3s1=F1), 2),
        "the backward of microbatch 0 (stage 1, chunk 0) must be in tick 3 or later, after the forward of microbatch 0 "
        "(stage 1, chunk 0) in tick 2, got tick 1",
    ),
    "a weight gradient before its input gradient": (
        lambda: Schedule(changed(HALVES, t2s1=W0, t3s1=I0), 1),
        "the weight gradient of microbatch 0 (stage 1, chunk 0) must be in tick 4 or later, after the input gradient "
        "of microbatch 0 (stage 1, chunk 0) in tick 3, got tick 2",
    ),
    "a backward before the loss of its group": (
        lambda: Schedule(changed(TABLE, t2s1=B0, t3s1=F1), 2),
        "the backward of microbatch 0 (stage 1, chunk 0) must be in tick 4 or later, after the forward of microbatch 1 "
        "(stage 1, chunk 0) in tick 3, got tick 2; move it",
    ),
    "two units in a tick": (
        lambda: Schedule(changed(TABLE, t1s0=None, t0s0=(F0, F1)), 2),
        "a stage must do one Unit in a tick, or None, got (Unit(kind=<Kind.FORWARD",
    ),
    "a stage without a cell": (
        lambda: Schedule((*TABLE, (None,)), 2),
        "a table must have ticks with a cell for each stage, got rows of [1, 2] cells; pass None where a stage is idle",
    ),
    "no stage": (lambda: in_order([], 1), "a table must have ticks with a cell for each stage, got rows of [] cells"),
    "no microbatch": (lambda: Schedule(TABLE, 0), "microbatches must be a whole number from 1, got 0; pass"),
    "no chunk": (lambda: Schedule(TABLE, 2, chunks=0), "chunks must be a whole number from 1, got 0; pass chunks=1"),
    "orders that wait for each other": (
        lambda: in_order([(F0, B0, F1, B1), (F1, B1, F0, B0)], 2),
        "got orders in which the backward of microbatch 0 (stage 0, chunk 0) waits forever for the input gradient of "
        "microbatch 0 (stage 1, chunk 0); put it later, or the other one earlier",
    ),
    "an order in which no group is complete": (
        lambda: in_order([(F0, F1, B0, B1), (F0, B0, F1, B1)], 2),
        "got orders in which the backward of microbatch 0 (stage 1, chunk 0) waits forever for the forward of "
        "microbatch 1 (stage 1, chunk 0); put it later, or the other one earlier",
    ),
    "orders that lack a unit": (
        lambda: in_order([(F0, B0)], 2),
        "must do the forward of microbatch 1 (stage 0, chunk 0), got it in no tick",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_schedule_is_refused(case):
    make, message = BROKEN[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_units_run_in_the_first_tick_in_which_they_can():
    assert in_order([(F0, F1, B0, B1)] * 2, 2).table == TABLE
    late = in_order([(F0, F1, B0, B1), (F1, F0, B0, B1)], 2)  # stage 1 waits for F1, and stage 0 waits for B0
    begun = {(stage, unit): tick for tick, stage, unit in late.units()}
    assert [begun[1, unit] for unit in (F1, F0, B0, B1)] == [2, 3, 4, 5]
    assert [begun[0, unit] for unit in (F0, F1, B0, B1)] == [0, 1, 5, 6]


def test_groups_are_as_many_microbatches_as_stages():
    assert [group_of(m, 3, 8) for m in (0, 2, 3, 6, 7)] == [range(3), range(3), range(3, 6), range(6, 8), range(6, 8)]
    last = Unit(BACKWARD, 6, 1)
    assert needs(2, last, 3, 8, 2) == [(2, Unit(FORWARD, m, 1)) for m in (6, 7)]
    neighbours = [(1, Unit(FORWARD, 6, 1)), (2, Unit(INPUT_GRADIENT, 6, 1))]
    assert needs(1, last, 3, 8, 2) == neighbours  # the others wait for their neighbour only


def test_a_schedule_is_a_value():
    assert hash(make_schedule("zero-bubble", 2, 4)) == hash(make_schedule("zero-bubble", 2, 4))
    with pytest.raises(ValueError, match="has no forward of microbatch 1"):
        dataclasses.replace(make_schedule("zero-bubble", 2, 4), microbatches=1)  # looked at again
