"""All findings of a folder: the worst first, each with its run."""

import re
from pathlib import Path

import numpy as np
from run_logs import break_gradient, freeze, healthy, put_outliers, spike

from jax_fp8.report import step_checks, tensor_checks
from jax_fp8.report.findings import find
from jax_fp8.report.run_folder import read_run


def test_a_healthy_folder_of_two_runs_has_none(tmp_path):
    log, other = healthy(), healthy(run="bf16", seed=1)
    log.metrics += other.metrics
    log.diagnostics += other.diagnostics
    folder = read_run(log.write(tmp_path / "run"))
    assert folder.runs == ["delayed", "bf16"] and find(folder) == []


def test_the_worst_comes_first(tmp_path):
    log, other = healthy(), healthy(run="bf16", seed=1)
    spike(log, 30)
    put_outliers(log, "h_0/mlp/down", "input", 10)
    freeze(log, "h_1/mlp/down", "input", 12)
    log.tensor(20, "h_0/attention/out", "kernel")["saturated"] = 0.01
    log.events = [{"run": "delayed", "step": 27, "event": "skipped", "loss": 9.3, "limit": 5.2}]
    break_gradient(other, "h_1/mlp/down", 8)
    log.metrics += other.metrics
    log.diagnostics += other.diagnostics
    found = find(read_run(log.write(tmp_path / "run")))
    kinds = [(finding.level, finding.kind, finding.run) for finding in found]
    assert kinds == [
        ("critical", "frozen scale", "delayed"),
        ("critical", "not finite", "bf16"),
        ("warning", "skipped steps", "delayed"),
        ("warning", "outliers", "delayed"),
        ("warning", "gradient jump", "delayed"),
        ("warning", "loss spike", "delayed"),
        ("note", "saturation", "delayed"),
    ]
    assert all(finding.sentence.endswith(".") and finding.remedy.endswith(".") for finding in found)


def test_no_warnings_of_numpy_for_extreme_numbers(tmp_path):
    """Warnings are errors in these tests."""
    log = healthy(layers=1, count=8)
    extremes = [0.0, 1e-45, 3e38, 1e300, None, -1.0, 1e-300]
    generator = np.random.default_rng(0)
    for row in log.diagnostics:
        for entry in (*row["tensors"], *row["gradients"]):
            for key, value in entry.items():
                if isinstance(value, float):
                    entry[key] = extremes[generator.integers(len(extremes))]
    find(read_run(log.write(tmp_path / "run")))


def test_the_documentation_has_every_kind_and_its_threshold():
    page = (Path(__file__).parents[2] / "docs/how_to/diagnose.md").read_text()
    rows = {cells[1].strip(): cells[2] for line in page.splitlines() if len(cells := line.split("|")) == 5}
    kinds = {*tensor_checks.REMEDIES, *step_checks.REMEDIES}
    assert kinds == {kind for name in rows for kind in name.split(", ")} & kinds
    thresholds = {
        "frozen scale": (tensor_checks.FROZEN_STEPS, tensor_checks.FROZEN_HEADROOM),
        "saturation": (100 * tensor_checks.SATURATED,),
        "scale too large": (tensor_checks.WIDE_HEADROOM, tensor_checks.LASTING),
        "outliers": (100 * tensor_checks.UNDERFLOWED, tensor_checks.LASTING),
        "large error": tuple(100 * error for error in tensor_checks.ERRORS.values()),
        "gradient jump": (step_checks.JUMP, step_checks.JUMP_WINDOW),
        "loss spike": (step_checks.SPIKE, step_checks.SPIKE_WINDOW),
    }
    for kind, numbers in thresholds.items():
        for value in numbers:
            assert re.search(rf"(?<![\d.]){value:g}(?![\d.]*\d)", rows[kind]), (kind, value)
