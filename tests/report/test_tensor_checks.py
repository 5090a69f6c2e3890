"""Faults planted into tensors are named, where and since when; a healthy log has none."""

import numpy as np
import pytest
from run_logs import LARGEST, freeze, healthy, put_outliers, widen

from jax_fp8.report.diagnosed import gather, sample_of
from jax_fp8.report.tensor_checks import (
    ERRS,
    FROZEN,
    OUTLIERS,
    SATURATED,
    SATURATES,
    WIDE,
    check_tensors,
    severity,
)

LAYER = "h_1/mlp/down"


def findings_of(log):
    return check_tensors(gather(map(sample_of, log.diagnostics)))


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_log_has_none(seed):
    assert findings_of(healthy(layers=4, count=100, seed=seed)) == []


@pytest.mark.parametrize("tensor", ["input", "output_gradient"])
def test_a_frozen_scale(tensor):
    log = healthy()
    freeze(log, LAYER, tensor, 12)
    (finding,) = findings_of(log)
    assert (finding.level, finding.kind, finding.place) == ("critical", FROZEN, (LAYER, tensor))
    words = "input" if tensor == "input" else "output gradient"
    assert f"The {words} of {LAYER} saturated" in finding.sentence and "did not follow" in finding.sentence
    scales = [log.tensor(column, LAYER, tensor)["scale"] for column in range(40)]
    assert f"(frozen since step {10 * (scales.index(scales[-1]) + 1)})" in finding.sentence
    assert "too small since step 140" in finding.sentence  # 2 ** -(1 / 5) < 0.9
    assert "at step 400" in finding.sentence and "up to 42.2 times" in finding.sentence  # 2 ** (27 / 5)


def test_a_scale_that_was_frozen_for_a_while():
    log = healthy()
    later = healthy()
    freeze(log, LAYER, "input", 12)
    for column in range(20, 40):
        log.tensor(column, LAYER, "input").update(later.tensor(column, LAYER, "input"))
    (finding,) = findings_of(log)
    assert "to 200)" in finding.sentence and "frozen from step" in finding.sentence


def test_a_scale_that_follows_late_is_not_frozen():
    """The same amaxes, but the scale is that of the step before: headroom is below 1 in every step."""
    log = healthy()
    for column in range(12, 40):
        entry = log.tensor(column, LAYER, "input")
        amax = 4.0 * 1.2 ** (column - 11)
        entry |= {"amax": amax, "scale": amax / 1.2 / LARGEST["input"], "headroom": 1 / 1.2, "saturated": 1e-5}
    assert findings_of(log) == []
    for column in range(12, 40):
        log.tensor(column, LAYER, "input")["scale"] = 0.01
    assert [finding.kind for finding in findings_of(log)] == [FROZEN]


def test_saturation_in_several_steps_is_a_warning_and_in_one_a_note():
    log = healthy()
    log.tensor(7, LAYER, "input")["saturated"] = 0.021
    (finding,) = findings_of(log)
    assert (finding.level, finding.kind) == ("note", SATURATES)
    assert "saturated 2.1 % of its elements at step 80" in finding.sentence
    log.tensor(9, LAYER, "input")["saturated"] = 0.004
    (finding,) = findings_of(log)
    assert finding.level == "warning" and "2 of 40 diagnosed steps" in finding.sentence
    for column in (7, 9):
        log.tensor(column, LAYER, "input")["saturated"] = 0.9 * SATURATED
    assert findings_of(log) == []


def test_outliers():
    log = healthy()
    put_outliers(log, LAYER, "input", 30)
    (finding,) = findings_of(log)
    assert (finding.kind, finding.place) == (OUTLIERS, (LAYER, "input"))
    assert "20 % of its elements underflowed at step 310" in finding.sentence
    assert "headroom 1)" in finding.sentence and "10 of 40 diagnosed steps" in finding.sentence
    assert finding.level == "warning" and "has outliers" in finding.sentence
    for column in range(30, 40):  # of which most elements are nearly zero, and none is large
        log.tensor(column, LAYER, "input").update(amax=4.0)
    (finding,) = findings_of(log)
    assert finding.level == "note" and "may have outliers" in finding.sentence


def test_outliers_of_an_odd_batch_are_none():
    log = healthy()
    put_outliers(log, LAYER, "input", 38)
    assert findings_of(log) == []


def test_where_the_scale_is_too_large_are_no_outliers():
    log = healthy()
    put_outliers(log, LAYER, "input", 37)
    assert [finding.kind for finding in findings_of(log)] == [OUTLIERS]
    for column in (38, 39):
        log.tensor(column, LAYER, "input")["headroom"] = 100.0
    assert findings_of(log) == []  # each of the two in too few steps


def test_a_scale_that_is_far_too_large():
    log = healthy()
    widen(log, LAYER, "input", 30)
    (finding,) = findings_of(log)
    assert finding.kind == WIDE and "60 % of its elements underflowed" in finding.sentence
    for column in range(30, 40):  # room that nothing is lost by is no finding
        log.tensor(column, LAYER, "input").update(underflowed=1e-4, error=0.026)
    assert findings_of(log) == []


@pytest.mark.parametrize(("tensor", "error"), [("kernel", 0.1), ("output_gradient", 0.2)])
def test_a_large_error_of_unknown_cause(tensor, error):
    log = healthy()
    for column in (3, 4, 5):
        log.tensor(column, LAYER, tensor)["error"] = error
    (finding,) = findings_of(log)
    assert finding.kind == ERRS and f"has an error of {100 * error:.0f} %" in finding.sentence
    for column in (3, 4, 5):
        log.tensor(column, LAYER, tensor)["error"] = 0.7 * error
    assert findings_of(log) == []


def test_what_one_finding_explains_another_does_not_repeat():
    log = healthy()
    freeze(log, LAYER, "input", 12)  # which saturates and errs
    widen(log, "h_0/mlp/down", "input", 12)  # which underflows and errs
    log.tensor(3, "h_0/mlp/down", "input")["saturated"] = 0.02
    kinds = [(finding.kind, finding.place[0]) for finding in findings_of(log)]
    assert kinds == [(FROZEN, LAYER), (SATURATES, "h_0/mlp/down"), (WIDE, "h_0/mlp/down")]


def test_the_worst_of_a_kind_comes_first():
    log = healthy()
    freeze(log, LAYER, "input", 12)
    freeze(log, "h_0/mlp/down", "input", 20)
    put_outliers(log, "h_0/attention/out", "input", 20)
    found = findings_of(log)
    assert [finding.place[0] for finding in found] == [LAYER, "h_0/mlp/down", "h_0/attention/out"]


def test_few_diagnosed_steps_are_judged_as_well():
    log = healthy(count=2)
    put_outliers(log, LAYER, "input", 1)
    assert [finding.kind for finding in findings_of(log)] == [OUTLIERS]


def test_what_nobody_measured_has_no_findings():
    log = healthy(count=4)
    for row in log.diagnostics:
        for entry in row["tensors"]:
            entry.update(dict.fromkeys(("amax", "scale", "headroom", "saturated", "underflowed", "nonfinite", "error")))
    assert findings_of(log) == []


def test_severity_is_in_thresholds():
    log = healthy(count=4)
    log.tensor(1, LAYER, "input")["saturated"] = 0.005
    log.tensor(2, LAYER, "input")["nonfinite"] = 0.1
    diagnosed = gather(map(sample_of, log.diagnostics))
    row = severity(diagnosed)[diagnosed.places.index((LAYER, "input"))]
    np.testing.assert_allclose(row, [0.026 / 0.08, 5, np.inf, 0.026 / 0.08], rtol=0.2)
