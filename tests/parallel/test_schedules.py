"""The schedules that exist compute the gradients of the model: a runner in NumPy does what their tables say, and knows
nothing of the rules by which a schedule is checked.
"""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from jax_fp8.parallel.schedule import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Unit, in_order
from jax_fp8.parallel.schedules import SCHEDULES, layers_of_stage, make_schedule

CASES = [
    (name, stages, microbatches, chunks)
    for name, stages, microbatches in itertools.product(SCHEDULES, (1, 2, 3, 4), (1, 2, 3, 4, 8, 12))
    for chunks in ((2, 3) if name == "interleaved" else (1,))
    if microbatches >= stages and (name != "interleaved" or microbatches % stages == 0)
]
WIDTH = 3


class Layers:
    """`layers` times y = tanh(x w), with a loss of half the squares: forward and the halves of backward by hand."""

    def __init__(self, layers, microbatches):
        rng = np.random.default_rng(0)
        self.weights = rng.normal(size=(layers, WIDTH, WIDTH))
        self.batch = rng.normal(size=(microbatches, 2, WIDTH))

    def gradients(self):
        """Of one microbatch after the other, without a pipeline."""
        found = np.zeros_like(self.weights)
        for x in self.batch:
            kept = [x]
            for weight in self.weights:
                kept.append(np.tanh(kept[-1] @ weight))
            dy = kept[-1]
            for layer in reversed(range(len(self.weights))):
                dz = dy * (1 - kept[layer + 1] ** 2)
                found[layer] += kept[layer].T @ dz
                dy = dz @ self.weights[layer].T
        return found


class Mail:
    """What is on its way between stages. A message can be taken once, and not in the tick in which it is sent."""

    def __init__(self):
        self.messages = {}

    def send(self, tick, to, name, what):
        self.messages[to, name] = tick, what

    def take(self, tick, stage, name):
        sent, what = self.messages.pop((stage, name))
        if sent >= tick:
            raise KeyError(name)
        return what


def run(table, layers, stages, chunks):
    """The gradients of a model with one layer in each chunk. KeyError where a stage needs what it has not."""
    found, mail, kept = np.zeros_like(layers.weights), Mail(), [{} for _ in range(stages)]
    outputs = {}
    cells = [(tick, stage, unit) for tick, row in enumerate(table) for stage, unit in enumerate(row) if unit]
    for tick, stage, unit in cells:
        m, layer = unit.microbatch, unit.chunk * stages + stage
        weight, is_last = layers.weights[layer], layer + 1 == len(layers.weights)
        if unit.kind is FORWARD:
            x = layers.batch[m] if layer == 0 else mail.take(tick, stage, ("x", m, layer))
            y = np.tanh(x @ weight)
            kept[stage]["activations", m, layer] = x, y
            if is_last:
                outputs[m] = y
                group = [of for of in range(len(layers.batch)) if of // stages == m // stages]
                if all(of in outputs for of in group):  # the loss of all of them, whose gradient is the output
                    for of in group:
                        mail.send(tick, stage, ("dy", of, layer), outputs[of])
            else:
                mail.send(tick, (stage + 1) % stages, ("x", m, layer + 1), y)
        if unit.kind in (BACKWARD, INPUT_GRADIENT):
            x, y = kept[stage].pop(("activations", m, layer))
            dz = mail.take(tick, stage, ("dy", m, layer)) * (1 - y**2)
            kept[stage]["operands", m, layer] = x, dz
            if layer > 0:
                mail.send(tick, (stage - 1) % stages, ("dy", m, layer - 1), dz @ weight.T)
        if unit.kind in (BACKWARD, WEIGHT_GRADIENT):
            x, dz = kept[stage].pop(("operands", m, layer))
            found[layer] += x.T @ dz
    assert not mail.messages and not any(kept)  # nothing was computed for nobody
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_the_model(name):
    for of_name, stages, microbatches, chunks in CASES:
        if of_name == name:
            layers = Layers(stages * chunks, microbatches)
            schedule = make_schedule(name, stages, microbatches, chunks)
            found = run(schedule.table, layers, stages, chunks)
            np.testing.assert_allclose(found, layers.gradients(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_runner_notices_a_wrong_table(name):
    """Negative control: two ticks exchanged, a backward before the loss of its group, a unit left out."""
    chunks = 2 if name == "interleaved" else 1
    microbatches = 2 if name == "gpipe" else 4  # in the last forwards of gpipe only the last group has no loss
    layers, table = Layers(2 * chunks, microbatches), make_schedule(name, 2, microbatches, chunks).table
    first = next(tick for tick, row in enumerate(table) if row[1] and row[1].kind is not FORWARD)
    for tick in (0, 1, first - 1, len(table) - 2):
        exchanged = (*table[:tick], table[tick + 1], table[tick], *table[tick + 2 :])
        if name != "zero-bubble" or tick != len(table) - 2:  # there two weight gradients, in any order
            with pytest.raises(KeyError):
                run(exchanged, layers, 2, chunks)
    for tick, stage in ((0, 0), (len(table) - 1, 0)):
        row = tuple(None if s == stage else unit for s, unit in enumerate(table[tick]))
        with pytest.raises((KeyError, AssertionError)):
            run((*table[:tick], row, *table[tick + 1 :]), layers, 2, chunks)


def kinds(row):
    return {unit.kind for unit in row if unit is not None}


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_stages_do_work_of_one_kind(name):
    """But for weight gradients: they take no longer than what they stand beside."""
    for of_name, stages, microbatches, chunks in CASES:
        if of_name == name:
            table = make_schedule(name, stages, microbatches, chunks).table
            longest = [kinds(row) - {WEIGHT_GRADIENT} or {WEIGHT_GRADIENT} for row in table]
            assert all(len(of_tick) == 1 for of_tick in longest)
            count = collections.Counter(kind for of_tick in longest for kind in of_tick)
            assert count.pop(FORWARD) == chunks * microbatches + stages - 1
            assert (
                count.pop(INPUT_GRADIENT if name == "zero-bubble" else BACKWARD) == chunks * microbatches + stages - 1
            )
            assert set(count) <= {WEIGHT_GRADIENT}


def test_orders_of_the_papers_do_not():
    """Negative control: stages with a warmup of their own are in opposite phases."""
    forwards, backwards = ([Unit(kind, m) for m in range(8)] for kind in (FORWARD, BACKWARD))

    def order(warmup):
        pairs = itertools.zip_longest(forwards[warmup:], backwards)
        return forwards[:warmup] + [unit for pair in pairs for unit in pair if unit is not None]

    table = in_order([order(3), order(2)], 8).table
    assert {FORWARD, BACKWARD} in [kinds(row) for row in table]


def test_the_warmup_is_as_short_as_can_be():
    """One tick of forwards less, and the first backward stands before the loss of its group."""
    for name, chunks in (("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)):
        schedule = make_schedule(name, 4, 12, chunks)
        first = next(tick for tick, row in enumerate(schedule.table) if kinds(row) - {FORWARD})
        assert first == 4 * chunks + 3
        table = [*schedule.table]
        table[first - 1 : first + 1] = table[first - 1 : first + 1][::-1]
        with pytest.raises(ValueError, match=r"after the forward of microbatch 3 \(stage 3"):
            dataclasses.replace(schedule, table=tuple(table))


def test_weight_gradients_fill_idle_places():
    """From 3 P - 2 microbatches on every stage hides P - 1 of them; the others have ticks of their own."""
    for stages, microbatches in itertools.product(range(1, 9), range(1, 33)):
        if microbatches >= stages:
            table = make_schedule("zero-bubble", stages, microbatches).table
            alone = [row for row in table if kinds(row) == {WEIGHT_GRADIENT}]
            hidden = min(stages - 1, max(microbatches > stages, microbatches - 2 * stages + 1))
            assert len(alone) == microbatches - hidden


def added_in_order(schedule):
    """Whether each stage adds up the gradients of a chunk one microbatch after the other, the first one first."""
    added = [
        [unit.microbatch for unit in order if unit.chunk == chunk and unit.kind in (BACKWARD, WEIGHT_GRADIENT)]
        for order in schedule.orders
        for chunk in range(schedule.chunks)
    ]
    return all(of_chunk == [*range(schedule.microbatches)] for of_chunk in added)


def test_gradients_are_added_up_in_one_order():
    """So their sums have the same bits with all schedules: see tests/parallel/test_runner.py."""
    for name, stages, microbatches, chunks in CASES:
        assert added_in_order(make_schedule(name, stages, microbatches, chunks))
    backwards = [Unit(BACKWARD, m) for m in (3, 2, 1, 0)]  # negative control: the last microbatch first
    assert not added_in_order(in_order([[Unit(FORWARD, m) for m in range(4)] + backwards] * 2, 4))


def test_orders_of_stages():
    def letters(name, stages, stage, microbatches=4, chunks=1):
        kinds = {FORWARD: "F", BACKWARD: "B", INPUT_GRADIENT: "I", WEIGHT_GRADIENT: "W"}
        units = make_schedule(name, stages, microbatches, chunks).orders[stage]
        return " ".join(kinds[unit.kind] + str(unit.microbatch) + "'" * unit.chunk for unit in units)

    assert letters("gpipe", 2, 0) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert letters("1f1b", 2, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert letters("1f1b", 2, 1) == "F0 F1 B0 B1 F2 F3 B2 B3"
    assert letters("zero-bubble", 2, 1, 5) == "F0 F1 I0 I1 F2 W0 F3 I2 I3 F4 I4 W1 W2 W3 W4"
    assert letters("interleaved", 2, 1, 4, 2) == "F0 F1 F0' F1' B0' B1' B0 B1 F2 F3 F2' F3' B2' B3' B2 B3"


def test_layers_of_a_stage():
    assert layers_of_stage(1, 12, 4) == (range(3, 6),)
    assert layers_of_stage(1, 16, 4, chunks=2) == (range(2, 4), range(10, 12))
    for stages, chunks in ((1, 1), (2, 3), (4, 2)):
        found = [layers_of_stage(stage, 24, stages, chunks) for stage in range(stages)]
        in_order_of_model = [layer for chunk in zip(*found, strict=True) for layers in chunk for layer in layers]
        assert in_order_of_model == [*range(24)]


REFUSED = {
    "a name": (
        lambda: make_schedule("1b1f", 2, 4),
        "a schedule must be one of gpipe, 1f1b, interleaved, zero-bubble, got '1b1f'; choose one of these",
    ),
    "fewer microbatches than stages": (
        lambda: make_schedule("1f1b", 4, 3),
        "a pipeline needs as many microbatches as stages, or more, got 3 microbatches for 4 stages; pass at least 4 mi",
    ),
    "fewer, of gpipe": (lambda: make_schedule("gpipe", 4, 3), "got 3 microbatches for 4 stages; pass at least 4 micro"),
    "fewer, of zero-bubble": (lambda: make_schedule("zero-bubble", 4, 3), "got 3 microbatches for 4 stages; pass at"),
    "fewer, of interleaved": (
        lambda: make_schedule("interleaved", 4, 2, 2),
        "got 2 microbatches for 4 stages; pass at",
    ),
    "no multiple": (lambda: make_schedule("interleaved", 4, 10, 2), "got 10 microbatches for 4 stages; pass 12 micro"),
    "one chunk": (lambda: make_schedule("interleaved", 4, 8), "needs several chunks on each stage, got chunks=1; pass"),
    "chunks of gpipe": (lambda: make_schedule("gpipe", 4, 8, 2), "gpipe has one chunk .*, got chunks=2; leave it out"),
    "chunks of 1f1b": (lambda: make_schedule("1f1b", 4, 8, 2), "1f1b has one chunk of layers on each stage, got chunk"),
    "chunks of zero-bubble": (lambda: make_schedule("zero-bubble", 4, 8, 2), "zero-bubble has one chunk of layers on"),
    "no stages": (lambda: make_schedule("gpipe", 0, 8), "stages must be a whole number from 1, got 0; pass stages=1"),
    "no microbatches": (lambda: make_schedule("1f1b", 2, 0), "microbatches must be a whole number from 1, got 0"),
    "half a stage": (lambda: make_schedule("zero-bubble", 2.0, 8), "stages must be a whole number from 1, got 2.0"),
    "no chunks": (lambda: make_schedule("interleaved", 2, 8, 0), "chunks must be a whole number from 1, got 0"),
    "layers": (
        lambda: layers_of_stage(0, 24, 5),
        "all chunks of all stages must have the same number of layers, got 24 layers for 5 stages with 1 chunks each",
    ),
    "layers of chunks": (lambda: layers_of_stage(0, 12, 4, 2), "with 2 chunks each; pass a multiple of 8 layers"),
    "a stage": (lambda: layers_of_stage(4, 24, 4), "stage must be among 0 to 3, got 4; pass one of these"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_schedule_of_ones_own_is_one_function():
    """The forwards of a group, then its backwards: no two groups at a time."""

    def group_by_group(stages, microbatches):
        groups = [range(first, min(first + stages, microbatches)) for first in range(0, microbatches, stages)]
        order = [Unit(kind, m) for group in groups for kind in (FORWARD, BACKWARD) for m in group]
        return in_order([order] * stages, microbatches)

    layers = Layers(3, 5)
    np.testing.assert_allclose(run(group_by_group(3, 5).table, layers, 3, 1), layers.gradients(), rtol=1e-12)
