"""What is read of a run's folder, what is left out, and what is said of it."""

import json
import math
import os

import numpy as np
import pytest
from run_logs import healthy

from jax_fp8.report import diagnosed, run_folder
from jax_fp8.report.run_folder import FILES, read_run


def test_rows_become_arrays(tmp_path):
    log = healthy(layers=1, count=6)
    folder = read_run(log.write(tmp_path / "run"))
    assert folder.config == log.config and folder.remarks == () and folder.events == ()
    assert folder.runs == ["delayed"]
    metrics, diagnosed = folder.metrics["delayed"], folder.diagnosed["delayed"]
    np.testing.assert_array_equal(metrics.steps, range(0, 70, 10))
    assert math.isnan(metrics.values["loss"][0])  # before the first step there is only a validation
    np.testing.assert_array_equal(metrics.values["loss"][1:], [row["loss"] for row in log.metrics[1:]])
    assert metrics.last("val_loss") == (50, log.metrics[5]["val_loss"])  # the last row has none
    np.testing.assert_array_equal(diagnosed.steps, range(10, 70, 10))
    assert folder.begun <= folder.ended


def test_an_old_log_lacks_what_was_measured_later(tmp_path):
    row = {"run": "bf16", "step": 10, "loss": 3.5, "tokens_per_second": None, "val_loss": 3.6}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    metrics = read_run(tmp_path).metrics["bf16"]
    assert metrics.last("loss") == (10, 3.5) and metrics.last("peak_memory_gib") is None


def test_a_half_written_last_line_is_left_out_and_a_broken_line_is_said(tmp_path):
    log = healthy(layers=1, count=6)
    path = log.write(tmp_path / "run")
    for name in FILES[1:3]:
        with (path / name).open("a") as file:
            file.write('{"run": "delayed", "step": 70, "lo')
    folder = read_run(path)
    assert folder.remarks == () and len(folder.diagnosed["delayed"].steps) == 6
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text("not a row\n" + text)
    folder = read_run(path)
    assert folder.remarks == (
        "1 line of metrics.jsonl could not be read, the first is line 1; the report ignores such lines.",
    )
    assert len(folder.metrics["delayed"].steps) == 7


NO_ROWS = [
    "[]",
    "3",
    '"run"',
    "{}",
    '{"run": 1, "step": 1}',
    '{"run": "a", "step": "1"}',
    '{"run": "a", "step": -1}',
    '{"run": "a", "step": true}',
    '{"run": "a", "step": 1e300}',
    '{"run": "a", "step": 1, "loss": "low"}',
    '{"run": "a", "step": 1, "loss": {}}',
    '{"run": "a", "step": 1, "tensors": [{}]}',
    '{"run": "a", "step": 1, "tensors": 3}',
    '{"run": "a", "step": 1, "tensors": [{"layer": "l", "tensor": "input", "amax": []}]}',
    '{"run": "a", "step": 1, "gradients": [[]]}',
    "[" * 100_000,
    "\x00\x00",
]


@pytest.mark.parametrize("line", NO_ROWS, ids=lambda line: line[:70])
def test_what_is_no_row_is_left_out(tmp_path, line):
    good = '{"run": "a", "step": 1, "loss": 2.0, "tensors": [], "gradients": []}'
    (tmp_path / "diagnostics.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    folder = read_run(tmp_path)
    assert [folder.diagnosed["a"].losses.tolist()] == [[2.0]]
    assert any(remark.startswith("1 line of diagnostics.jsonl") for remark in folder.remarks)


def test_numbers_that_are_not_finite_are_unknown_however_they_are_written(tmp_path):
    rows = "".join(f'{{"run": "a", "step": {step}, "loss": {text}}}\n' for step, text in enumerate(("NaN", "1e999")))
    for name in ("metrics.jsonl", "diagnostics.jsonl"):
        (tmp_path / name).write_text(rows)
    folder = read_run(tmp_path)
    assert np.isnan(folder.metrics["a"].values["loss"]).all()
    assert not np.isfinite(folder.diagnosed["a"].losses).any()


def test_of_a_step_that_was_taken_again_the_last_row_counts(tmp_path):
    log = healthy(layers=1, count=4)
    for rows in (log.metrics, log.diagnostics):
        rows += [{**rows[-2], "loss": 1.25}, {**rows[-1], "loss": 1.0}]
    log.events = [{"run": "delayed", "step": 25, "event": "skipped", "loss": loss} for loss in (9.0, 8.0)]
    folder = read_run(log.write(tmp_path / "run"))
    for found in (folder.metrics["delayed"].values["loss"][1:], folder.diagnosed["delayed"].losses):
        assert len(found) == 4 and found[2:].tolist() == [1.25, 1.0]
    assert [event.sample.loss for event in folder.events] == [8.0]


def test_what_is_missing_is_said_with_how_to_get_it(tmp_path):
    path = healthy(layers=1, count=4).write(tmp_path / "run")
    (path / "diagnostics.jsonl").unlink()
    (remark,) = read_run(path).remarks
    assert "diagnostics.jsonl is missing or empty" in remark and "--diagnose-every 10" in remark
    (path / "diagnostics.jsonl").write_text("")
    assert read_run(path).remarks == (remark,)
    (path / "metrics.jsonl").unlink()
    (path / "config.json").write_text("[")
    assert [remark.split()[0] for remark in read_run(path).remarks] == [
        "config.json",
        "config.json",
        "metrics.jsonl",
        "diagnostics.jsonl",
    ]


def test_a_model_without_fp8_says_so(tmp_path):
    log = healthy(layers=1, count=4, run="bf16")
    for row in log.diagnostics:
        row["tensors"] = []
    (remark,) = read_run(log.write(tmp_path / "run")).remarks
    assert "names no FP8 tensors" in remark


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_not_read(name, tmp_path):
    """A pipe would be waited for, and a device read until memory ends."""
    path = healthy(layers=1, count=4).write(tmp_path / "run")
    for make, arrived in ((os.mkfifo, "a pipe"), (lambda path: path.symlink_to("/dev/zero"), "a device")):
        (path / name).unlink(missing_ok=True)
        make(path / name)
        with pytest.raises(ValueError, match=f"needs to read the files of a run, got {arrived} for .*{name}; change"):
            read_run(path)
    (path / name).unlink()
    with (path / name).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=f"got 1,099,511,627,776 bytes, of which at most .* are read for .*{name}"):
        read_run(path)


def test_a_row_that_is_longer_than_rows_are(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "MOST_LINE", 100)
    good = '{"run": "a", "step": 1, "loss": 2.0}'
    (tmp_path / "metrics.jsonl").write_text(f'{good}\n{{"run": "{"a" * 1000}", "step": 2}}\n{good}\n')
    folder = read_run(tmp_path)
    assert folder.runs == ["a"] and len(folder.metrics["a"].steps) == 1
    assert folder.remarks[0].startswith("1 line of metrics.jsonl could not be read, the first is line 2")


@pytest.mark.parametrize("text", ['{"a": ' * 900 + "1" + "}" * 900, '{"a": 1, "a": 2}', "[]", "\x00"])
def test_a_configuration_that_is_none_is_left_out(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    folder = read_run(tmp_path)
    assert folder.config == {} and folder.remarks[0].startswith("config.json is not a JSON object, and was ignored: ")


def test_a_time_that_no_calendar_has(tmp_path):
    path = healthy(layers=1, count=2).write(tmp_path / "run")
    try:
        os.utime(path / "config.json", (2**40, 2**40))
    except (OSError, OverflowError):
        pytest.skip("no such time on this file system")
    assert read_run(path).ended.year in (2446, 9999)


def test_more_names_than_memory_has_room_for(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosed, "MOST_CELLS", 100)
    rows = [{"run": "a", "step": step, "gradients": [{"layer": f"{step}"}]} for step in range(11)]
    (tmp_path / "diagnostics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:10]))
    assert len(read_run(tmp_path).diagnosed["a"].layers) == 10
    (tmp_path / "diagnostics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        ValueError, match="room for 100 tensors times steps, got 0 tensors and 11 layers in 11 steps; remove"
    ):
        read_run(tmp_path)


def test_a_folder_that_is_no_run(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"at least one of config\.json, .*, got .* without; name a folder"):
            read_run(path)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"needs to read .* run, got a folder for .*metrics\.jsonl"):
        read_run(tmp_path)
