"""Logs of a run that goes on: what a checkpoint knows of stays, and what is damaged is told in one sentence."""

import json
import os

import pytest


def test_logs_go_on_from_a_checkpoint(example, tmp_path, capsys):
    """Each by itself; what it has lost is said, and what came later goes."""
    record, logs = example("record"), example("logs")
    rows = [{"run": run, "step": step} for run in ("delayed", "bf16") for step in (0, 7)]
    for name in logs.LOGS:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = {"metrics": {"delayed": 1, "bf16": 3}, "diagnostics": {"delayed": 2}}
    folder = record.Folder(tmp_path, "x", 4, existing=record.Existing(tmp_path, counts))
    folder.take_up()
    kept = [rows[0], rows[2], rows[3]]

    def read(name):
        return [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]

    assert folder.rows == kept == read("metrics")
    assert (read("diagnostics"), read("events")) == (rows[:2], [])
    said = capsys.readouterr().out
    assert said.count("rows from before the checkpoint") == 1
    assert f"{tmp_path / 'metrics.jsonl'} has lost 1 rows from before the checkpoint" in said
    assert folder.counts() == {"metrics": {"delayed": 1, "bf16": 2}, "diagnostics": {"delayed": 2}, "events": {}}
    folder.take_up()  # once
    assert folder.rows == kept


ROW = b'{"run": "delayed", "step": 0, "loss": null, "val_loss": 5.5}\n'
BROKEN = {
    "binary": b"\xff\xfe\x00\n",
    "no JSON": b"step 0, loss 5.5\n",
    "a list": b"[]\n",
    "an empty line": b"\n",
    "nested": b"[" * 10**5 + b"\n",
    "no run": b'{"step": 0}\n',
    "a run that is a list": b'{"run": ["delayed"], "step": 0}\n',
    "no step": b'{"run": "delayed"}\n',
    "a step that is a half": b'{"run": "delayed", "step": 0.5}\n',
    "a name twice": b'{"run": "delayed", "run": "bf16", "step": 0}\n',
}


@pytest.mark.parametrize("name", ["metrics", "diagnostics", "events"])
@pytest.mark.parametrize("case", [*BROKEN, "a text for a loss", "a pipe", "a folder"])
def test_a_log_that_is_damaged_is_one_sentence(case, name, example, tmp_path):
    logs, path = example("logs"), tmp_path / f"{name}.jsonl"
    if case in ("a pipe", "a folder"):
        (os.mkfifo if case == "a pipe" else os.mkdir)(path)
    elif case in BROKEN:
        path.write_bytes(ROW + BROKEN[case] + ROW)
    elif name == "metrics":
        path.write_bytes(ROW + ROW.replace(b"5.5", b'"low"') + ROW)
    else:
        return
    with pytest.raises(example("notes").CannotResume) as raised:
        logs.Log(path, True).take_up({"delayed": 2})
    sentence = str(raised.value)
    assert sentence.startswith(f"{path} must have the rows that a run wrote, one JSON object a line, got ")
    assert sentence.endswith("; move it away, and the run goes on without them") and "\n" not in sentence
    assert len(sentence) < 400 and (" in line 2; " in sentence) == (case not in ("a pipe", "a folder"))


def test_what_was_written_after_a_checkpoint_may_be_damaged(example, tmp_path):
    """It goes anyway; a disk without power leaves zeros there."""
    path, log = tmp_path / "metrics.jsonl", example("logs").Log
    path.write_bytes(ROW + ROW + b"\0" * 100 + b"\n" + b"\xff")
    assert len(log(path, True).take_up({"delayed": 2})) == 2
    assert path.read_bytes() == ROW + ROW


def test_a_log_that_is_a_link_is_not_followed_when_it_is_cut(example, tmp_path):
    precious, path = tmp_path / "precious", tmp_path / "metrics.jsonl"
    precious.write_bytes(ROW + ROW)
    path.symlink_to(precious)
    assert len(example("logs").Log(path, True).take_up({"delayed": 1})) == 1
    assert precious.read_bytes() == ROW + ROW and path.read_bytes() == ROW
