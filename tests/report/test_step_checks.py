"""Steps with numbers that are not finite, skipped steps, jumps and spikes are named; a healthy log has none."""

import numpy as np
import pytest
from run_logs import break_gradient, healthy, spike

from jax_fp8.report.diagnosed import gather, sample_of
from jax_fp8.report.run_folder import read_run
from jax_fp8.report.step_checks import (
    JUMPS,
    NOT_FINITE,
    SKIPPED,
    SPIKES,
    STOPPED,
    check_events,
    check_finite,
    check_jumps,
    check_loss,
    medians_before,
)

LAYER = "h_1/mlp/down"


def diagnosed_of(log):
    return gather(map(sample_of, log.diagnostics))


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_log_has_none(seed, tmp_path):
    log = healthy(layers=4, count=100, seed=seed)
    diagnosed, folder = diagnosed_of(log), read_run(log.write(tmp_path / "run"))
    assert [*check_finite(diagnosed), *check_jumps(diagnosed), *check_loss(folder.metrics["delayed"])] == []
    assert check_events([]) == []


@pytest.mark.parametrize("norm", [None, 0.2])
def test_a_nan_in_one_layers_gradient(norm):
    """Whether the norm is that of the finite elements or unknown."""
    log = healthy()
    break_gradient(log, LAYER, 7)
    log.gradient(7, LAYER)["norm"] = norm
    (finding,) = check_finite(diagnosed_of(log))
    assert (finding.level, finding.kind) == ("critical", NOT_FINITE)
    assert finding.sentence == f"The gradient of {LAYER} has 1 element that is not finite, at step 80."


def test_nans_in_the_gradients_of_several_layers():
    log = healthy()
    for layer in (LAYER, "h_0/mlp/down"):
        break_gradient(log, layer, 7)
        break_gradient(log, layer, 9)
    (finding,) = check_finite(diagnosed_of(log))
    assert finding.sentence.startswith("The gradient of h_0/mlp/down has 1 element")
    assert f"2 such layers among 10; the backward pass computes {LAYER} first" in finding.sentence
    assert finding.sentence.endswith("This happened in 2 diagnosed steps.")


def test_where_the_forward_breaks_it_begins_with_the_first_tensor():
    log = healthy()
    for layer, tensor in ((LAYER, "input"), (LAYER, "output_gradient"), ("h_0/mlp/down", "output_gradient")):
        log.tensor(7, layer, tensor).update(amax=None, nonfinite=0.125)
    (finding,) = check_finite(diagnosed_of(log))
    assert finding.place == (LAYER, "input")
    assert f"The input of {LAYER} is not finite in 12.5 % of its elements at step 80" in finding.sentence
    assert "all 24 tensors 3 had" in finding.sentence and "backward" not in finding.sentence


def test_where_the_backward_breaks_it_begins_with_the_last_layer():
    log = healthy()
    for layer in ("h_0/mlp/down", LAYER, "h_1/attention/out"):
        log.tensor(7, layer, "output_gradient").update(amax=None, nonfinite=0.5)
    (finding,) = check_finite(diagnosed_of(log))
    assert finding.place == (LAYER, "output_gradient") and "the backward pass computes it first" in finding.sentence


def test_a_loss_that_is_not_finite():
    log = healthy()
    for column in (3, 5):
        log.diagnostics[column]["loss"] = None
    (finding,) = check_finite(diagnosed_of(log))
    assert finding.sentence == "The loss was not finite at steps 40 and 60."


def test_events(tmp_path):
    log = healthy(count=4)
    log.events = [
        {"run": "delayed", "step": 27, "event": "skipped", "loss": 9.3, "limit": 5.2, "fault": "a is not finite"},
        {"run": "delayed", "step": 28, "event": "skipped", "loss": None, "limit": None, "fault": None},
        {"run": "delayed", "step": 29, "event": "stopped", "loss": 3.0, "limit": 5.2},
    ]
    stopped, skipped = check_events(list(read_run(log.write(tmp_path / "run")).events))
    assert (stopped.kind, skipped.kind) == (STOPPED, SKIPPED)
    assert stopped.sentence == "The run stopped at step 29, with a loss of 3."
    assert skipped.sentence == (
        "2 steps changed nothing: steps 27 and 28. The first was skipped with a loss of 9.3, above the limit of 5.2. "
        "Diagnosed: a is not finite."
    )


def test_a_spike_of_all_gradients():
    log = healthy()
    spike(log, 30)
    (finding,) = check_jumps(diagnosed_of(log))
    assert (finding.level, finding.kind) == ("warning", JUMPS)
    assert "at step 310" in finding.sentence and "In 10 of 10 layers" in finding.sentence
    spiked = healthy()
    spike(spiked, 30, factor=4)  # as batches differ
    assert check_jumps(diagnosed_of(spiked)) == []


def test_the_gradient_of_one_layer_jumps():
    log = healthy()
    log.gradient(30, LAYER)["norm"] *= 100
    (finding,) = check_jumps(diagnosed_of(log))
    assert finding.level == "warning" and f"The gradient norm of {LAYER} jumped to" in finding.sentence
    log.gradient(30, LAYER)["norm"] /= 6  # above its own median, but not all gradients together
    (finding,) = check_jumps(diagnosed_of(log))
    assert finding.level == "note" and "The norm of all gradients was" in finding.sentence


def test_what_grows_from_nearly_nothing_is_no_jump():
    log = healthy()
    for column in range(40):
        log.gradient(column, LAYER)["norm"] = 1e-5 if column < 30 else 5e-3
    assert check_jumps(diagnosed_of(log)) == []


def test_the_first_steps_are_no_jumps():
    log = healthy()
    spike(log, 3)
    assert check_jumps(diagnosed_of(log)) == []


def test_medians_are_of_the_steps_before():
    norms = np.random.default_rng(0).uniform(1, 2, (3, 60))
    norms[1, 10:40:2] = np.nan
    norms[2, :57] = np.nan
    found = medians_before(norms)
    for column in range(60):
        for row in range(3):
            before = norms[row, max(0, column - 20) : column]
            before = before[np.isfinite(before)]
            expected = np.median(before) if len(before) >= 5 else np.nan
            np.testing.assert_allclose(found[row, column], expected)


def test_a_spike_of_the_loss(tmp_path):
    log = healthy()
    spike(log, 30)
    (finding,) = check_loss(read_run(log.write(tmp_path / "run")).metrics["delayed"])
    assert finding.kind == SPIKES and "in the row of step 310" in finding.sentence


def test_a_loss_that_stays_high_is_one_spike_until_it_is_the_rule(tmp_path):
    log = healthy()
    for row in log.metrics[20:]:
        row["loss"] += 3
    found = check_loss(read_run(log.write(tmp_path / "run")).metrics["delayed"])
    assert len(found) == 1 and "in the row of step 200" in found[0].sentence
