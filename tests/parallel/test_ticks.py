"""The arrays of `Ticks` are all that a runner needs: one in NumPy, which sees no schedule, computes the outputs and the
gradients of the model. Its buffers begin as NaN, and are overwritten where and when those of the step are.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from jax_fp8.parallel.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Schedule, Unit, in_order
from jax_fp8.parallel.schedules import SCHEDULES, make_schedule
from jax_fp8.parallel.ticks import Branch, make_ticks
from jax_fp8.parallel.timeline import most_kept

SIZES = [(1, 1), (1, 3), (2, 2), (2, 4), (2, 7), (3, 3), (3, 12), (4, 4), (4, 8), (4, 10), (4, 16), (8, 16)]
BACKWARDS = BACKWARD, INPUT_GRADIENT
ROWS, WIDTH = 2, 3


def schedules(name):
    """One of each size that it can have, with the number of chunks."""
    for (stages, microbatches), chunks in itertools.product(SIZES, (2, 3) if name == "interleaved" else (1,)):
        if name != "interleaved" or microbatches % stages == 0:
            yield make_schedule(name, stages, microbatches, chunks)


def poisoned(*shape):
    return np.full((*shape, ROWS, WIDTH), np.nan)


class Model:
    """Layers y = tanh(x w), and a head whose gradient is the cosine of the output. No two of its numbers are equal."""

    def __init__(self, layers, microbatches):
        rng = np.random.default_rng(0)
        self.weights = rng.normal(size=(layers, WIDTH, WIDTH))
        self.batch = rng.normal(size=(microbatches, ROWS, WIDTH))

    def without_pipeline(self):
        """The outputs, input gradients and weight gradients, one microbatch after the other."""
        outputs, inputs, weights = [], [], np.zeros_like(self.weights)
        for x in self.batch:
            kept = [x]
            for weight in self.weights:
                kept.append(np.tanh(kept[-1] @ weight))
            outputs.append(kept[-1])
            dy = np.cos(kept[-1])
            for layer in reversed(range(len(self.weights))):
                dz = dy * (1 - kept[layer + 1] ** 2)
                weights[layer] += kept[layer].T @ dz
                dy = dz @ self.weights[layer].T
            inputs.append(dy)
        return np.stack(outputs), np.stack(inputs), weights


class Runner:
    """The buffers of all stages, and what they do with them in each tick. A layer is a chunk of a stage."""

    def __init__(self, ticks, model):
        self.ticks, self.model = ticks, model
        self.stages = ticks.branch.shape[1]
        self.activations, self.gradients = (poisoned(self.stages, ticks.places) for _ in range(2))
        self.kept = [poisoned(3, self.stages, slots) for slots in ticks.slots]  # x, y, dz
        microbatches = len(model.batch)
        self.group = poisoned(self.stages)  # what the last stage has for the head
        self.outputs, self.head, self.inputs = (poisoned(microbatches) for _ in range(3))
        self.weights = np.zeros_like(model.weights)

    def run(self):
        for tick in range(len(self.ticks.branch)):
            sent = [self.do(tick, stage) for stage in range(self.stages)]
            for stage in range(self.stages):
                _put(self.activations[stage], self.ticks.put_activation[tick, stage], sent[stage - 1][0])
                _put(self.gradients[stage], self.ticks.put_gradient[tick, stage], sent[(stage + 1) % self.stages][1])
            if self.ticks.loss[tick] >= 0:
                first = self.ticks.loss[tick] * self.stages
                for microbatch in range(first, min(first + self.stages, len(self.model.batch))):
                    self.outputs[microbatch] = self.group[microbatch - first]
                    self.head[microbatch] = np.cos(self.group[microbatch - first])
        return self.outputs, self.inputs, self.weights

    def do(self, tick, stage):
        """What a stage sends on and sends back: NaN if it has nothing to send."""
        on, back = poisoned(), poisoned()
        number, microbatch, taken = (
            int(array[tick, stage]) for array in (self.ticks.branch, self.ticks.microbatch, self.ticks.taken)
        )
        if not number:
            return on, back
        branch = self.ticks.branches[number - 1]
        layer = branch.chunk * self.stages + stage
        is_first, is_last = layer == 0, layer == len(self.model.weights) - 1
        weight, kept = self.model.weights[layer], self.kept[branch.chunk][:, stage, branch.slot]
        if branch.kind is FORWARD:
            kept[0] = self.model.batch[microbatch] if is_first else self.activations[stage, taken]
            kept[1] = on = np.tanh(kept[0] @ weight)
            if is_last:
                self.group[microbatch % self.stages] = on
        if branch.kind in BACKWARDS:
            dy = self.head[microbatch] if is_last else self.gradients[stage, taken]
            kept[2] = dy * (1 - kept[1] ** 2)
            back = kept[2] @ weight.T
            if is_first:
                self.inputs[microbatch] = back
        if branch.kind in (BACKWARD, WEIGHT_GRADIENT):
            self.weights[layer] += kept[0].T @ kept[2]
        return on, back


def _put(inbox, place, what):
    """One past the last is nowhere; further is a mistake."""
    assert 0 <= place <= len(inbox)
    if place < len(inbox):
        inbox[place] = what


def model_of(schedule):
    return Model(schedule.stages * schedule.chunks, schedule.microbatches)


def is_right(schedule, ticks):
    """Whether the runner finds in these arrays what the model computes."""
    model = model_of(schedule)
    pairs = zip(Runner(ticks, model).run(), model.without_pipeline(), strict=True)
    return all(np.allclose(found, expected, rtol=1e-12, atol=1e-12) for found, expected in pairs)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_arrays_are_enough_to_run_a_schedule(name):
    for schedule in schedules(name):
        assert is_right(schedule, make_ticks(schedule)), (schedule.stages, schedule.microbatches, schedule.chunks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_there_are_as_many_slots_as_are_needed(name):
    """Those that a timeline counts; and an inbox has one place, for in a lane what arrives is read in its next tick."""
    for schedule in schedules(name):
        ticks = make_ticks(schedule)
        assert ticks.slots == tuple(map(max, zip(*most_kept(schedule), strict=True)))
        assert ticks.places == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_branches_are_those_that_occur(name):
    for schedule in schedules(name):
        ticks = make_ticks(schedule)
        assert {*np.unique(ticks.branch)} - {0} == {*range(1, len(ticks.branches) + 1)}
        assert [branch for branch in ticks.branches if branch.kind is FORWARD] == [
            Branch(FORWARD, chunk, slot) for chunk, slots in enumerate(ticks.slots) for slot in range(slots)
        ]
        found = [(tick, stage) for tick, stage in zip(*np.nonzero(ticks.branch), strict=True)]
        assert found == [(tick, stage) for tick, stage, _ in schedule.units()]
        for tick, stage, unit in schedule.units():
            branch = ticks.branches[ticks.branch[tick, stage] - 1]
            assert Unit(branch.kind, ticks.microbatch[tick, stage], branch.chunk) == unit
        arrays = ticks.branch, ticks.microbatch, ticks.taken, ticks.put_activation, ticks.put_gradient, ticks.loss
        assert all(array.dtype == np.int32 and len(array) == len(schedule.table) for array in arrays)


def groups_waiting(schedule, ticks):
    """The most groups at a time that have their loss, and a backward on the last stage that has not read it."""
    unread, most = set(), 0
    for tick, row in enumerate(schedule.table):
        unit = row[-1]
        if unit is not None and unit.kind in BACKWARDS and unit.chunk == schedule.chunks - 1:
            unread.remove(unit.microbatch)
        if ticks.loss[tick] >= 0:
            first = ticks.loss[tick] * schedule.stages
            unread |= {*range(first, min(first + schedule.stages, schedule.microbatches))}
        most = max(most, len({microbatch // schedule.stages for microbatch in unread}))
    return most


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_gradients_of_one_group_wait_at_a_time(name):
    """But for gpipe, where those of all groups wait for the last forward."""
    for schedule in schedules(name):
        groups = -(-schedule.microbatches // schedule.stages)
        assert groups_waiting(schedule, make_ticks(schedule)) == (groups if name == "gpipe" else 1)


def waiting(late) -> Schedule:
    """Stage 1 has an order of its own, and takes its last two forwards when they have been waiting in its inbox."""
    kinds = {"F": FORWARD, "B": BACKWARD}
    orders = "F0 F1 F2 F3 B0 B1 B2 B3", late
    return in_order([[Unit(kinds[name[0]], int(name[1])) for name in order.split()] for order in orders], 4)


@pytest.mark.parametrize("late", ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 F1 B0 B1 F2 F3 B2 B3"])
def test_a_schedule_of_ones_own_may_need_more_places(late):
    schedule = waiting(late)
    ticks = make_ticks(schedule)
    assert ticks.places == 2 and is_right(schedule, ticks)
    assert not is_right(schedule, dataclasses.replace(ticks, places=1, **_squeezed(ticks)))
    assert not is_right(schedule, dataclasses.replace(ticks, taken=1 - ticks.taken))


def _squeezed(ticks):
    """All that waits in place 0."""
    return {
        name: np.where(getattr(ticks, name) < ticks.places, 0, 1) for name in ("put_activation", "put_gradient")
    } | {"taken": np.zeros_like(ticks.taken)}


def without_slot(ticks, chunk):
    """What would be in the last slot of a chunk shares the one before."""
    most = ticks.slots[chunk] - 2
    branches = tuple(
        dataclasses.replace(branch, slot=min(branch.slot, most)) if branch.chunk == chunk else branch
        for branch in ticks.branches
    )
    slots = tuple(most + 1 if of == chunk else slots for of, slots in enumerate(ticks.slots))
    return dataclasses.replace(ticks, branches=branches, slots=slots)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_runner_notices_wrong_arrays(name):
    """Negative control: a slot too few, what arrives put nowhere, a loss too early or too late, a wrong microbatch."""
    schedule = make_schedule(name, 3, 9, 2 if name == "interleaved" else 1)
    ticks = make_ticks(schedule)
    wrong = [without_slot(ticks, chunk) for chunk in range(schedule.chunks)]
    for field in ("put_activation", "put_gradient"):
        array = getattr(ticks, field)
        wrong += [changed(ticks, field, where, 1) for where in np.argwhere(array == 0)]
    wrong += [dataclasses.replace(ticks, loss=np.roll(ticks.loss, by)) for by in (-1, 1)]
    wrong.append(changed(ticks, "microbatch", (0, 0), 1))
    assert is_right(schedule, ticks) and not any(is_right(schedule, arrays) for arrays in wrong)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("field", ["put_activation", "put_gradient"])
def test_what_waits_must_not_be_overwritten(name, field):
    """Negative control: nothing is wanted of a neighbour in a tick, and is put where something waits nevertheless."""
    schedule = make_schedule(name, 3, 9, 2 if name == "interleaved" else 1)
    ticks = make_ticks(schedule)
    array, reads = getattr(ticks, field), _reads(ticks, [FORWARD] if field == "put_activation" else BACKWARDS)
    arrived_before = np.vstack([np.zeros_like(array[:1]), array[:-1] == 0])
    waits = np.argwhere((array == 1) & arrived_before & ~reads)
    assert len(waits) > 2
    assert not any(is_right(schedule, changed(ticks, field, where, 0)) for where in waits)


def _reads(ticks, kinds):
    """The ticks and stages of units of these kinds."""
    return np.isin(ticks.branch, [1 + number for number, branch in enumerate(ticks.branches) if branch.kind in kinds])


def changed(ticks, field, where, value):
    """The arrays with another number in one of them."""
    array = getattr(ticks, field).copy()
    array[tuple(where)] = value
    return dataclasses.replace(ticks, **{field: array})
