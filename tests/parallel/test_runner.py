"""The loop over the ticks of a schedule computes what the model computes without a pipeline, on 2 and 4 devices, from
arrays that begin as NaN. Tables in which one number is wrong are found.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import on_devices
from jax.sharding import PartitionSpec as P
from pipeline import Pipeline, TanhLayers
from reference import assert_same_bits

from jax_fp8.jaxprs.equations import inner_jaxprs
from jax_fp8.kernels.uninitialized import uninitialized
from jax_fp8.parallel import runner
from jax_fp8.parallel.runner import run_schedule
from jax_fp8.parallel.schedule import BACKWARD, FORWARD, WEIGHT_GRADIENT, Schedule, Unit, in_order
from jax_fp8.parallel.schedules import SCHEDULES, make_schedule
from jax_fp8.parallel.ticks import Ticks


@functools.cache
def pipeline(name, stages, microbatches) -> Pipeline:
    return Pipeline(make_schedule(name, stages, microbatches, 2 if name == "interleaved" else 1))


# The last group of a step need not be whole, but for interleaved.
SIZES = [(2, 2), pytest.param(2, 5, marks=pytest.mark.versions), (4, 6)]
MICROBATCHES = 6  # of two stages


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_the_model(name, stages, microbatches):
    if name == "interleaved":
        microbatches = -(-microbatches // stages) * stages
    assert pipeline(name, stages, microbatches).is_right()


@pytest.mark.versions
def test_all_schedules_find_the_same_bits():
    """They add up in one order; and what lies in the slots is what was put there."""
    first, *others = (pipeline(name, 2, MICROBATCHES).run() for name in SCHEDULES)
    for other in others:
        for field in ("loss", "gradients", "dx"):
            assert_same_bits(getattr(other, field), getattr(first, field))


@pytest.mark.versions
@pytest.mark.parametrize(("name", "stages"), [("interleaved", 2), ("zero-bubble", 4)])
def test_several_conditionals_find_the_same_bits(name, stages, monkeypatch):
    """As a pipeline with many slots has them; here each slot has one, which is handed no other's arrays."""
    one = pipeline(name, stages, MICROBATCHES)
    expected = one.run()  # is traced before the limit is another
    monkeypatch.setattr(runner, "MOST_WORK", 1)
    several = Pipeline(make_schedule(name, stages, MICROBATCHES, 2 if name == "interleaved" else 1))
    slots = sum(one.ticks.slots)
    assert [len(found) for found in switches(one)] == [1 + len(one.ticks.branches)] and slots > 3
    assert len(switches(several)) == slots
    for field in ("loss", "gradients", "dx", "counts"):
        assert_same_bits(getattr(several.run(), field), getattr(expected, field))


def switches(of: Pipeline) -> list:
    """The branches of each conditional of units: those of a loss have two."""
    found: list = []

    def look(jaxpr):
        for equation in jaxpr.eqns:
            branches = equation.params.get("branches", ())
            if len(branches) > 2:
                found.append(branches)
            else:
                for inner in inner_jaxprs(equation):
                    look(inner)

    look(of.program.trace(*of.arguments()).jaxpr.jaxpr)
    return found


def changed(ticks, field, where, value) -> Ticks:
    """The tables with another number in one of them."""
    table = getattr(ticks, field).copy()
    table[where] = value
    return dataclasses.replace(ticks, **{field: table})


def other_slot(ticks, number) -> int | None:
    """A branch of the same kind and chunk with another slot, by its number."""
    branch = ticks.branches[number - 1]
    others = [
        1 + at
        for at, other in enumerate(ticks.branches)
        if (other.kind, other.chunk) == (branch.kind, branch.chunk) and other.slot != branch.slot
    ]
    return others[0] if others else None


def wrong_units(ticks: Ticks) -> Iterator[tuple[str, Ticks]]:
    """Tables in which a stage takes one thing for another."""
    stages, chunks = ticks.branch.shape[1], len(ticks.slots)
    for where in map(tuple, np.argwhere(ticks.branch > 0)):
        (tick, stage), number = where, ticks.branch[where]
        kind, chunk = ticks.branches[number - 1].kind, ticks.branches[number - 1].chunk
        if kind is not FORWARD and (other := other_slot(ticks, number)):
            yield "a slot", changed(ticks, "branch", where, other)
        if kind is not WEIGHT_GRADIENT and (stage, chunk) in ((0, 0), (stages - 1, chunks - 1)):
            yield "a microbatch", changed(ticks, "microbatch", where, (ticks.microbatch[where] + 1) % MICROBATCHES)
        if kind is FORWARD and (stage, chunk) != (0, 0) and ticks.put_activation[tick - 1, stage] == 0:
            yield "a place that is read", changed(ticks, "taken", where, ticks.places)


def wrong_ticks(ticks: Ticks) -> Iterator[tuple[str, Ticks]]:
    """Tables in which something is lost, comes at a wrong time, or was not to be done."""
    for field in ("put_activation", "put_gradient"):
        for where in map(tuple, np.argwhere(getattr(ticks, field) == 0)):
            yield "a place for what arrives", changed(ticks, field, where, ticks.places)
    yield "a loss too early", dataclasses.replace(ticks, loss=np.roll(ticks.loss, -1))
    backwards = [1 + at for at, branch in enumerate(ticks.branches) if branch.kind in (BACKWARD, WEIGHT_GRADIENT)]
    for where in map(tuple, np.argwhere(ticks.branch == 0)):
        yield "work in a bubble", changed(ticks, "branch", where, backwards[0])


@pytest.mark.versions
@pytest.mark.parametrize("name", SCHEDULES)
def test_one_wrong_number_is_noticed(name):
    """Negative control."""
    of_schedule = pipeline(name, 2, MICROBATCHES)
    wrong = [*wrong_units(of_schedule.ticks), *wrong_ticks(of_schedule.ticks)]
    kinds = ["a slot", "a microbatch", "a place that is read", "a place for what arrives", "a loss too early"]
    assert {what for what, _ in wrong} == {*kinds, "work in a bubble"} and len(wrong) > 40
    missed = [what for what, ticks in wrong if of_schedule.is_right(ticks)]
    assert of_schedule.is_right() and not missed, missed


def waiting() -> Schedule:
    """Stage 1 has an order of its own: what arrives waits in an inbox of two places."""
    kinds = {"F": FORWARD, "B": BACKWARD}
    orders = "F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 B0 B1 F2 F3 B2 B3"
    return in_order([[Unit(kinds[name[0]], int(name[1])) for name in order.split()] for order in orders], 4)


@pytest.mark.versions
def test_what_arrives_may_wait():
    own = Pipeline(waiting())
    assert own.ticks.places == 2 and own.is_right()
    assert not own.is_right(dataclasses.replace(own.ticks, taken=1 - own.ticks.taken))


@pytest.mark.versions
def test_layers_may_keep_nothing():
    """Then there is nothing to share out among conditionals."""
    own = Pipeline(make_schedule("1f1b", 2, 2))

    class Twice(TanhLayers):
        def forward(self, x):
            return 2 * x, []

        def backward(self, kept, dy, totals):
            return 2 * dy, totals

    def on_stage(weights):
        inputs = jnp.ones((2, 2, 8))

        def loss(number, y, totals):
            return y, totals + y.sum()

        dx, _, total = run_schedule(own.ticks, [Twice(weights[0])], loss, inputs, jnp.float32(0), uninitialized)
        return dx[None], total[None]

    dx, total = on_devices(
        on_stage,
        own.weights[own.places][:, 0],
        in_specs=P("pipe"),
        out_specs=P("pipe"),
        pipe=2,
    )
    assert (dx[0] == 16).all() and total.sum() == 2 * 2 * 8 * 4  # two stages there, and two back


@pytest.mark.versions
def test_a_layer_must_return_what_it_takes():
    own = Pipeline(make_schedule("1f1b", 2, 2))

    class Wider(TanhLayers):
        def forward(self, x):
            return jnp.concatenate([x, x], axis=1), [x]

    def on_stage(weights):
        inputs = jnp.zeros((2, 2, 8))
        return run_schedule(
            own.ticks, [Wider(weights[0])], lambda number, y, totals: (y, totals), inputs, (), uninitialized
        )

    with pytest.raises(
        ValueError, match=r"must return what it takes, float32 \(2, 8\), got float32 \(2, 16\); put what"
    ):
        on_devices(on_stage, own.weights[own.places][:, 0], in_specs=P("pipe"), out_specs=P("pipe"), pipe=2)
