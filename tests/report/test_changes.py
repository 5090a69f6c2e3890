"""What changed in a step that was skipped, against the last diagnosed step before it."""

import copy
import math

import pytest
from run_logs import healthy

from jax_fp8.report.changes import changes, column_before, doublings
from jax_fp8.report.diagnosed import gather, sample_of

LAYER = "h_1/mlp/down"


@pytest.fixture
def log():
    return healthy()


def skipped(log):
    """A step like the last one, to be changed: entries by name."""
    row = copy.deepcopy(log.diagnostics[-1])
    tensors = {(entry["layer"], entry["tensor"]): entry for entry in row["tensors"]}
    return row, tensors, {entry["layer"]: entry for entry in row["gradients"]}


def changes_of(log, row):
    diagnosed = gather(map(sample_of, log.diagnostics))
    return changes(sample_of(row), diagnosed, len(log.diagnostics) - 1)


def test_a_step_like_the_one_before_changed_nothing(log):
    row, *_ = skipped(log)
    assert changes_of(log, row) == []


def test_the_largest_change_comes_first(log):
    row, tensors, gradients = skipped(log)
    tensors[LAYER, "input"].update(saturated=0.021)  # from 0: 7.7 doublings
    tensors["h_0/mlp/down", "input"]["amax"] *= 16
    gradients[LAYER]["norm"] *= 1024
    gradients["embedding"]["norm"] *= 1.5
    found = changes_of(log, row)
    assert [change.what for change in found] == [
        f"gradient of {LAYER}: norm",
        f"input of {LAYER}: saturated",
        "input of h_0/mlp/down: amax",
    ]
    assert found[0].change == "1,024 x" and found[2].change == "16 x"
    assert (found[1].after, found[1].change) == ("2.1 %", "+2.1 points")


def test_what_is_not_finite_comes_before_all_from_where_it_began(log):
    row, tensors, gradients = skipped(log)
    gradients["embedding"]["norm"] *= 1e6
    for layer in ("h_0/mlp/down", LAYER, "h_0/attention/out"):
        tensors[layer, "output_gradient"].update(amax=None, nonfinite=0.125)
    gradients[LAYER].update(norm=None, nonfinite=7)
    found = changes_of(log, row)
    assert [change.size for change in found] == [math.inf] * 4 + [pytest.approx(math.log2(1e6), rel=1e-3)]
    order = [LAYER, "h_0/mlp/down", "h_0/attention/out"]  # of the backward
    assert [change.what for change in found[:3]] == [f"output gradient of {layer}: not finite" for layer in order]
    assert found[3][:3] == (f"gradient of {LAYER}: elements not finite", "0", "7")
    tensors["h_1/attention/out", "input"].update(amax=None, nonfinite=0.125)  # the forward comes before
    assert changes_of(log, row)[0].what == "input of h_1/attention/out: not finite"


def test_what_the_step_before_lacks_is_not_compared(log):
    row, tensors, gradients = skipped(log)
    tensors[LAYER, "input"].update(layer="new", amax=1e9)
    gradients[LAYER].update(layer="new", norm=1e9)
    assert changes_of(log, row) == []


def test_the_step_before():
    diagnosed = gather(map(sample_of, healthy(count=4).diagnostics))
    assert [column_before(diagnosed, step) for step in (10, 11, 20, 21, 99)] == [None, 0, 0, 1, 3]
    assert column_before(None, 10) is None


@pytest.mark.parametrize(
    ("before", "after", "floor", "size"),
    [(1, 8, 0, 3), (8, 1, 0, 3), (0, 0.01, 0.01, 0), (0, 0.04, 0.01, 2), (0, 5, 0, 0), (math.nan, 5, 0, 0)],
)
def test_doublings(before, after, floor, size):
    assert doublings(before, after, floor) == pytest.approx(size)
