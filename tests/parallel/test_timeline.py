"""What schedules cost, against the formulas of the papers that describe them, and against schedules that cost more."""

import itertools

import pytest

from jax_fp8.parallel.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Unit, in_order
from jax_fp8.parallel.schedules import SCHEDULES, make_schedule
from jax_fp8.parallel.timeline import Costs, Kept, Timeline, make_timeline, most_kept

# Backwards take longer than forwards, the weight gradient the shortest: attention has none.
UNEVEN = Costs(forward=1.0, input_gradient=1.25, weight_gradient=0.75)
SIZES = [*itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 8, 24))]
CHUNKS = 2, 3
PAIRS = (0, 0), (1, 0), (0, 1), (1, 1)  # microbatch and chunk


def work(costs):
    return costs.forward + costs.input_gradient + costs.weight_gradient


def with_warmup(schedule, warmup):
    """The same work with another number of forwards, of each stage, before forwards and backwards take turns."""
    orders = []
    for order, count in zip(schedule.orders, warmup, strict=True):
        forwards, backwards = ([unit for unit in order if unit.kind is kind] for kind in (FORWARD, BACKWARD))
        pairs = itertools.zip_longest(forwards[count:], backwards)
        orders.append(forwards[:count] + [unit for pair in pairs for unit in pair if unit is not None])
    return in_order(orders, schedule.microbatches, schedule.chunks)


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
    """(P - 1)(F + B - W) beside (P - 1)(F + B + W) of 1F1B: a third where they take equally long."""
    for stages, microbatches in SIZES:
        if microbatches >= stages:
            timeline = make_timeline(make_schedule("zero-bubble", stages, microbatches), costs)
            idle = timeline.time - microbatches * work(costs)
            expected = (stages - 1) * (costs.forward + costs.input_gradient - costs.weight_gradient)
            assert idle == pytest.approx(expected, abs=1e-12)
            assert timeline.bubble == pytest.approx(expected / timeline.time, abs=1e-12)
            if costs == Costs():
                beside = make_timeline(make_schedule("1f1b", stages, microbatches)).time - microbatches * work(costs)
                assert idle == pytest.approx(beside / 3)


def test_long_weight_gradients_do_not_all_fit_into_the_bubble():
    for costs in (Costs(forward=0.8, weight_gradient=0.9), Costs(input_gradient=0.8, weight_gradient=0.9)):
        timeline = make_timeline(make_schedule("zero-bubble", 4, 8), costs)
        published = 3 * (costs.forward + costs.input_gradient - costs.weight_gradient)
        assert timeline.time - 8 * work(costs) > published + 0.1


def test_zero_bubble_of_few_microbatches_is_still_faster():
    """Fewer than stages do not fill the pipeline: the bubble is more than a third then."""
    for stages, microbatches in ((2, 1), (4, 2), (8, 7)):
        idle, beside = (
            make_timeline(make_schedule(name, stages, microbatches)).time - 3 * microbatches
            for name in ("zero-bubble", "1f1b")
        )
        assert beside / 3 < idle < beside


def test_what_stages_keep():
    for stages, microbatches in SIZES:
        gpipe, one_f_one_b, zero_bubble = (
            most_kept(make_schedule(name, stages, microbatches)) for name in ("gpipe", "1f1b", "zero-bubble")
        )
        for s in range(stages):
            assert gpipe[s] == Kept(microbatches, 0, microbatches)
            at_most = min(stages - s, microbatches)
            assert one_f_one_b[s] == Kept(at_most, 0, at_most)
            assert zero_bubble[s].activations == at_most
            assert zero_bubble[s].operands == min(s + 1, microbatches)
            assert zero_bubble[s].microbatches == min(stages, microbatches) == one_f_one_b[0].microbatches
        for chunks in CHUNKS:
            if microbatches % stages == 0 and microbatches > stages:
                first = most_kept(make_schedule("interleaved", stages, microbatches, chunks))[0]
                assert first.activations == pytest.approx(stages * (1 + (stages - 1) / (stages * chunks)))


def test_what_is_kept_is_counted_until_it_has_been_read():
    units = [Unit(kind, m) for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) for m in range(3)]
    assert most_kept(in_order([units], 3)) == (Kept(3, 3, 3),)
    of_chunks = [Unit(kind, m, chunk) for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) for m, chunk in PAIRS]
    of_chunks[4:8] = of_chunks[4:8][::-1]
    assert most_kept(in_order([of_chunks], 2, chunks=2)) == (Kept(2, 2, 2),)
    one_by_one = [Unit(kind, m) for m in range(3) for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)]
    assert most_kept(in_order([one_by_one], 3)) == (Kept(1, 1, 1),)


def test_what_the_longer_warmup_of_interleaved_is_for():
    """With forwards for one way to the last stage in place of two, stages keep less and wait for transfers."""
    schedule = make_schedule("interleaved", 4, 8, 2)
    assert with_warmup(schedule, (10, 8, 6, 4)) == schedule
    shorter = with_warmup(schedule, (7, 6, 5, 4))
    assert [kept.activations for kept in most_kept(shorter)] == [4, 3.5, 3, 2.5]
    assert [kept.activations for kept in most_kept(schedule)] == [5.5, 4.5, 3.5, 2.5]
    assert make_timeline(shorter).time == make_timeline(schedule).time
    slow = Costs(transfer=0.1)
    assert make_timeline(shorter, slow).time > make_timeline(schedule, slow).time + 1


def test_wrong_schedules_cost_more():
    """Negative controls of the formulas: each is right, runs, and is found to be worse."""
    stages, microbatches = 4, 8
    right = make_schedule("1f1b", stages, microbatches)
    assert with_warmup(right, (3, 2, 1, 0)) == right
    more = with_warmup(right, (4, 3, 2, 1))
    assert [kept.activations for kept in most_kept(more)] == [5, 4, 3, 2]  # not [4, 3, 2, 1]
    fewer = with_warmup(right, (2, 1, 0, 0))
    assert make_timeline(fewer).bubble > make_timeline(right).bubble + 0.1
    one_by_one = with_warmup(right, (0, 0, 0, 0))
    assert make_timeline(one_by_one).bubble == pytest.approx(1 - 1 / stages)

    h1 = make_schedule("zero-bubble", stages, microbatches)
    at_once = in_order([_weight_gradients_at_once(order) for order in h1.orders], microbatches)
    assert make_timeline(at_once).bubble > make_timeline(h1).bubble + 0.05
    at_the_end = in_order([sorted(order, key=_is_weight_gradient) for order in h1.orders], microbatches)
    assert make_timeline(at_the_end).bubble > make_timeline(h1).bubble + 0.05
    assert [kept.operands for kept in most_kept(at_the_end)] == [8] * 4


def _is_weight_gradient(unit):
    return unit.kind is WEIGHT_GRADIENT


def _weight_gradients_at_once(order):
    """Each behind its input gradient, as if the backward had not been split."""
    found = []
    for unit in order:
        if not _is_weight_gradient(unit):
            found.append(unit)
        if unit.kind is INPUT_GRADIENT:
            found.append(Unit(WEIGHT_GRADIENT, unit.microbatch))
    return found


def test_transfers_and_common_ticks_take_time():
    slow = Costs(transfer=0.5)
    for name, chunks in zip(SCHEDULES, (1, 1, 2, 1), strict=True):
        schedule = make_schedule(name, 4, 8, chunks)
        alone = make_timeline(schedule).time
        assert make_timeline(schedule, slow).time > alone
        assert make_timeline(schedule, in_step=True).time >= alone
    gpipe, split = make_schedule("gpipe", 4, 8), make_schedule("zero-bubble", 4, 8)
    assert make_timeline(gpipe, slow).time == 33 + 2 * 3 * 0.5  # there and back, once
    # Where all stages wait for one another, forwards beside backwards of twice the length cost time. These have none,
    # or units of one length.
    assert make_timeline(gpipe, in_step=True).time == 33
    assert make_timeline(split, in_step=True).time == 27 == len(split.table)
    assert make_timeline(make_schedule("1f1b", 4, 8), in_step=True).time == 40


def test_units_of_a_stage_do_not_overlap():
    for name, chunks in zip(SCHEDULES, (1, 1, 2, 1), strict=True):
        for spans in make_timeline(make_schedule(name, 4, 8, chunks), UNEVEN).stages:
            assert all(one.end <= other.begin for one, other in itertools.pairwise(spans))
            assert sum(span.end - span.begin for span in spans) == pytest.approx(8 * work(UNEVEN))


PICTURES = {
    "1f1b": """\
stage 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
stage 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .""",
    "zero-bubble": """\
stage 0  F0 F1 .  B0 W0 F2 B1 W1 B2 W2
stage 1  .  F0 B0 F1 B1 W0 F2 B2 W1 W2""",
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_timeline_is_a_picture(name):
    schedule = make_schedule(name, 2, 3)
    assert str(make_timeline(schedule)) == PICTURES[name]
    for time in (0.1, 0.7, 1 / 3):  # sums of which are not exact
        costs = Costs(forward=time, input_gradient=time, weight_gradient=time)
        assert str(make_timeline(schedule, costs)) == PICTURES[name]


def test_a_picture_names_chunks_and_has_room_for_every_unit():
    first, second = str(make_timeline(make_schedule("interleaved", 2, 2, 2))).splitlines()
    assert first == "stage 0  F0a F1a F0b F1b .   .   B0b --  .   B1b --  B0a --  B1a --"
    assert second == "stage 1  .   F0a F1a F0b B0b --  F1b B1b --  B0a --  B1a --  .   ."
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
