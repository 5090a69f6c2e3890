"""A small form of `tests/kill_runs.py`: a run that is killed ends as if it had not been."""

import json

import kill_runs
import pytest


@pytest.mark.slow  # five starts of a run
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(tmp_path):
    given = {"kills": 3, "steps": 40, "every": 2, "seed": 0, "recipe": "bf16", "data": kill_runs.ROOT / "docs"}
    killed = kill_runs.kill_runs(tmp_path, **given)
    assert killed[0].while_it == "starts" and killed[0].checkpoint == 0
    assert 0 < killed[-1].checkpoint < 40


def make_run(path, losses, sums):
    (path / "checkpoints/4/notes").mkdir(parents=True)
    rows = [{"run": "bf16", "step": step, "loss": loss, "val_loss": None} for step, loss in losses]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "checkpoints/4/notes/metadata").write_text(json.dumps({"step": 4, "arrays": sums}))


@pytest.mark.parametrize(
    ("losses", "sums", "sentence"),
    [
        ([(0, 2.0), (4, 1.5)], {"params": {"a": 1}}, "the logs"),
        ([(0, 2.0), (4, 1.0)], {"params": {"a": 2}}, "the last checkpoints"),
        ([(0, 2.0)], {"params": {"a": 1}}, "the logs"),
    ],
)
def test_what_differs_is_found(losses, sums, sentence, tmp_path):
    make_run(tmp_path / "whole", [(0, 2.0), (4, 1.0)], {"params": {"a": 1}})
    make_run(tmp_path / "same", [(0, 2.0), (4, 1.0)], {"params": {"a": 1}})
    kill_runs.check_equal(tmp_path / "whole", tmp_path / "same")
    make_run(tmp_path / "other", losses, sums)
    with pytest.raises(AssertionError, match=f"^{sentence} of .* must be equal"):
        kill_runs.check_equal(tmp_path / "whole", tmp_path / "other")


def test_another_diagnosis_is_found(tmp_path):
    for name in ("whole", "other"):
        make_run(tmp_path / name, [(0, 2.0)], {})
        (tmp_path / name / "diagnostics.jsonl").write_text(json.dumps({"step": 5, "of": name}))
    with pytest.raises(AssertionError, match=r"^the diagnostics of .* must be equal"):
        kill_runs.check_equal(tmp_path / "whole", tmp_path / "other")


def test_a_step_twice_in_the_log_is_found(tmp_path):
    for name in ("whole", "other"):
        make_run(tmp_path / name, [(0, 2.0), (4, 1.0), (4, 1.0)], {})
    with pytest.raises(AssertionError, match=r"each step must be in the log once, got \[0, 4, 4\]"):
        kill_runs.check_equal(tmp_path / "whole", tmp_path / "other")
