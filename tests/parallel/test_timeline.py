"""What schedules cost: formulas for the time of common ticks, and schedules that cost more."""

import itertools

import pytest

from jax_fp8.parallel.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Schedule, Unit, in_order
from jax_fp8.parallel.schedules import SCHEDULES, make_schedule
from jax_fp8.parallel.timeline import Costs, Timeline, make_timeline, most_kept

# Input gradients take longer than forwards, weight gradients the shortest: attention has none.
UNEVEN = Costs(forward=1.0, input_gradient=1.25, weight_gradient=0.75)
SIZES = [
    (stages, microbatches)
    for stages, microbatches in itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 8, 12, 24))
    if microbatches >= stages
]
CHUNKS = 2, 3
PAIRS = (0, 0), (1, 0), (0, 1), (1, 1)  # microbatch and chunk
PICTURES = {
    "1f1b": """\
stage 0  F0 F1 F2 .  .  B0 -- .  B1 -- B2 --
stage 1  .  F0 F1 B0 -- B1 -- F2 B2 -- .  .""",
    "zero-bubble": """\
stage 0  F0 F1 F2 .  B0 W0 B1 B2 W1 W2
stage 1  .  F0 F1 B0 B1 F2 B2 W0 W1 W2""",
    "mixed": """\
stage 0  F0 F1 .  F2 .  B0 -- .  .  B1 -- B2 --
stage 1  .  F0 F1 B0 -- F2 .  B1 -- B2 -- .  .""",
}


def work(costs):
    return costs.forward + costs.input_gradient + costs.weight_gradient


@pytest.mark.parametrize("costs", [Costs(), UNEVEN], ids=["even", "uneven"])
def test_bubble_of_gpipe_and_1f1b(costs):
    for name, (stages, microbatches) in itertools.product(("gpipe", "1f1b"), SIZES):
        timeline = make_timeline(make_schedule(name, stages, microbatches), costs)
        assert timeline.time == pytest.approx((microbatches + stages - 1) * work(costs))
        assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=1e-12)


@pytest.mark.parametrize("costs", [Costs(), UNEVEN], ids=["even", "uneven"])
def test_bubble_of_interleaved(costs):
    for chunks, (stages, microbatches) in itertools.product(CHUNKS, SIZES):
        if microbatches % stages == 0:
            timeline = make_timeline(make_schedule("interleaved", stages, microbatches, chunks), costs)
            expected = (stages - 1) / (chunks * microbatches + stages - 1)
            assert timeline.bubble == pytest.approx(expected, abs=1e-12)
            assert timeline.time == pytest.approx((microbatches + (stages - 1) / chunks) * work(costs))


@pytest.mark.parametrize("costs", [Costs(), UNEVEN], ids=["even", "uneven"])
def test_bubble_of_zero_bubble(costs):
    """(P - 1)(F + B - W) beside (P - 1)(F + B + W) of 1F1B: a third where they take equally long. Fewer than 3 P - 2
    microbatches hide fewer weight gradients, and it is never more than (P - 1)(F + B).
    """
    for stages, microbatches in SIZES:
        timeline = make_timeline(make_schedule("zero-bubble", stages, microbatches), costs)
        hidden = min(stages - 1, max(microbatches > stages, microbatches - 2 * stages + 1))
        idle = (stages - 1) * (costs.forward + costs.input_gradient) - hidden * costs.weight_gradient
        assert timeline.time == pytest.approx(microbatches * work(costs) + idle)
        assert timeline.bubble == pytest.approx(idle / timeline.time, abs=1e-12)
        if microbatches >= 3 * stages - 2:
            published = (stages - 1) * (costs.forward + costs.input_gradient - costs.weight_gradient)
            assert idle == pytest.approx(published)


def test_what_stages_keep():
    for stages, microbatches in SIZES:
        gpipe, one_f_one_b, zero_bubble = (
            most_kept(make_schedule(name, stages, microbatches)) for name in ("gpipe", "1f1b", "zero-bubble")
        )
        assert gpipe == ((microbatches,),) * stages
        for s in range(stages):  # what it begins before the first backward of the first and of the second group
            first, more = 2 * stages - 1 - s, stages - 1 - s
            assert one_f_one_b[s] == (max(min(microbatches, first), min(microbatches - stages, first) + more),)
        if microbatches >= 3 * stages - 1:
            assert one_f_one_b == tuple((3 * stages - 2 - 2 * s,) for s in range(stages))
        assert max(zero_bubble) == (min(microbatches, 3 * stages - 2),)
        for chunks in CHUNKS:
            if microbatches % stages == 0 and microbatches >= 3 * stages:
                kept = most_kept(make_schedule("interleaved", stages, microbatches, chunks))
                assert kept == tuple((one_f_one_b[s][0], *[stages] * (chunks - 1)) for s in range(stages))


def test_what_is_kept_is_counted_until_the_last_unit_has_read_it():
    units = [Unit(kind, m) for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) for m in range(3)]
    assert most_kept(in_order([units], 3)) == ((3,),)
    of_chunks = [Unit(kind, m, chunk) for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) for m, chunk in PAIRS]
    of_chunks[4:8] = of_chunks[4:8][::-1]
    assert most_kept(in_order([of_chunks], 2, chunks=2)) == ((2, 2),)
    one_by_one = [Unit(kind, m) for m in range(3) for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)]
    assert most_kept(in_order([one_by_one], 3)) == ((1,),)


def test_wrong_schedules_cost_more():
    """Negative controls of the formulas: each is right, runs, and is found to be worse."""
    stages, microbatches = 4, 12
    right = make_schedule("1f1b", stages, microbatches)
    forwards, backwards = ([Unit(kind, m) for m in range(microbatches)] for kind in (FORWARD, BACKWARD))
    groups = [range(first, first + stages) for first in range(0, microbatches, stages)]
    by_group = [Unit(kind, m) for group in groups for kind in (FORWARD, BACKWARD) for m in group]
    one_group = in_order([by_group] * stages, microbatches)
    assert most_kept(one_group) == ((stages,),) * stages
    assert make_timeline(one_group).bubble > make_timeline(right).bubble + 0.2

    def warmed_up(count):
        pairs = itertools.zip_longest(forwards[count:], backwards)
        return forwards[:count] + [unit for pair in pairs for unit in pair if unit is not None]

    textbook = in_order([warmed_up(2 * (stages - 1) - stage) for stage in range(stages)], microbatches)
    assert max(most_kept(textbook)) < max(most_kept(right))  # it keeps less, in mixed ticks
    assert make_timeline(textbook).bubble > make_timeline(right).bubble + 0.1

    split = make_schedule("zero-bubble", stages, microbatches)
    at_the_end = Schedule(_with_weight_gradients_last(split), microbatches)
    assert make_timeline(at_the_end).bubble > make_timeline(split).bubble + 0.05
    assert most_kept(at_the_end) == ((microbatches,),) * stages


def _with_weight_gradients_last(schedule):
    """The table without ticks of weight gradients, and then these."""
    rows = [tuple(None if _is_weight_gradient(unit) else unit for unit in row) for row in schedule.table]
    last = [(Unit(WEIGHT_GRADIENT, m),) * schedule.stages for m in range(schedule.microbatches)]
    return (*(row for row in rows if any(row)), *last)


def _is_weight_gradient(unit):
    return unit is not None and unit.kind is WEIGHT_GRADIENT


def test_a_tick_takes_as_long_as_its_longest_unit():
    """In ticks 3 and 4 a stage with a forward waits for one with a backward."""
    F0, F1, F2, B0, B1, B2 = (Unit(kind, m) for kind in (FORWARD, BACKWARD) for m in range(3))
    mixed = Schedule(((F0, None), (F1, F0), (None, F1), (F2, B0), (B0, F2), (None, B1), (B1, B2), (B2, None)), 3)
    assert str(make_timeline(mixed)) == PICTURES["mixed"]
    assert make_timeline(mixed).time == 13 > make_timeline(make_schedule("1f1b", 2, 3)).time  # in ticks of one kind


def test_transfers_end_every_tick():
    for name, chunks in zip(SCHEDULES, (1, 1, 2, 1), strict=True):
        schedule = make_schedule(name, 4, 8, chunks)
        alone, slow = make_timeline(schedule).time, make_timeline(schedule, Costs(transfer=0.5)).time
        assert slow == alone + 0.5 * (len(schedule.table) - 1)


def test_units_of_a_stage_do_not_overlap():
    for name, chunks in zip(SCHEDULES, (1, 1, 2, 1), strict=True):
        for spans in make_timeline(make_schedule(name, 4, 8, chunks), UNEVEN).stages:
            assert all(one.end <= other.begin for one, other in itertools.pairwise(spans))
            assert sum(span.end - span.begin for span in spans) == pytest.approx(8 * work(UNEVEN))


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_a_timeline_is_a_picture(name):
    schedule = make_schedule(name, 2, 3)
    assert str(make_timeline(schedule)) == PICTURES[name]
    for time in (0.1, 0.7, 1 / 3):  # sums of which are not exact
        costs = Costs(forward=time, input_gradient=time, weight_gradient=time)
        assert str(make_timeline(schedule, costs)) == PICTURES[name]


def test_a_picture_names_chunks_and_has_room_for_every_unit():
    first, second = str(make_timeline(make_schedule("interleaved", 2, 2, 2))).splitlines()
    assert first == "stage 0  F0a F1a F0b F1b .   .   .   B0b --  B1b --  B0a --  B1a --"
    assert second == "stage 1  .   F0a F1a F0b F1b B0b --  B1b --  B0a --  B1a --  .   ."
    for name, chunks in zip(SCHEDULES, (1, 1, 2, 1), strict=True):
        schedule = make_schedule(name, 4, 12, chunks)
        lines = str(make_timeline(schedule, UNEVEN)).splitlines()
        for line, order in zip(lines, schedule.orders, strict=True):
            assert len([cell for cell in line.split()[2:] if cell[0] in "FBW"]) == len(order)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["forward", "input_gradient", "weight_gradient", "transfer"])
def test_costs_are_times(name, value):
    if name == "transfer" and value == 0:
        assert isinstance(make_timeline(make_schedule("1f1b", 2, 2), Costs(transfer=value)), Timeline)
        return
    with pytest.raises(ValueError, match=f"{name} must take a time .*, got .*; pass {name}="):
        Costs(**{name: value})
