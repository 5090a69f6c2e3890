"""Logs of a run that continues: what a checkpoint knows of stays, and what is damaged is told in one sentence; and the
logs as curves.
"""

import json
import os

import pytest
from tensorboardX.proto.event_pb2 import Event

from jax_fp8.report.run_format import DIAGNOSTICS, EVENTS, LOGS, MEASURED, METRICS, CannotResume
from jax_fp8.run import logs
from jax_fp8.run.folder import Existing, Folder


def test_logs_go_on_from_a_checkpoint(tmp_path, capsys):
    """Each by itself; what it has lost is said, and what came later goes."""
    rows = [{"run": run, "step": step} for run in ("delayed", "bf16") for step in (0, 7)]
    for name in LOGS:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = {METRICS: {"delayed": 1, "bf16": 3}, DIAGNOSTICS: {"delayed": 2}}
    run = Folder(tmp_path, "x", 4, existing=Existing(tmp_path, counts))
    run.take_up()
    kept = [rows[0], rows[2], rows[3]]

    def read(name):
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    assert run.rows == kept == read(METRICS)
    assert (read(DIAGNOSTICS), read(EVENTS)) == (rows[:2], [])
    said = capsys.readouterr().out
    assert said.count("rows from before the checkpoint") == 1
    assert f"{tmp_path / 'metrics.jsonl'} has lost 1 rows from before the checkpoint" in said
    assert run.counts() == {METRICS: {"delayed": 1, "bf16": 2}, DIAGNOSTICS: {"delayed": 2}, EVENTS: {}}
    run.take_up()  # once
    assert run.rows == kept


TENSOR = {"layer": "layer_0/mlp/down", "tensor": "input", "amax": 1.23456789, "scale": 2.0, "headroom": 0.5,
          "saturated": 0.125, "underflowed": 0.0, "nonfinite": 0.0, "error": None}  # fmt: skip
ROWS = {"tensors": [TENSOR, TENSOR | {"saturated": 0.25}], "gradients": [{"layer": "a", "norm": 3.0, "nonfinite": 0}]}
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


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("case", [*BROKEN, "a text for a loss", "a pipe", "a folder"])
def test_a_log_that_is_damaged_is_one_sentence(case, name, tmp_path):
    path = tmp_path / name
    if case in ("a pipe", "a folder"):
        (os.mkfifo if case == "a pipe" else os.mkdir)(path)
    elif case in BROKEN:
        path.write_bytes(ROW + BROKEN[case] + ROW)
    elif name == METRICS:
        path.write_bytes(ROW + ROW.replace(b"5.5", b'"low"') + ROW)
    else:
        return
    with pytest.raises(CannotResume) as raised:
        logs.Log(path, True).take_up({"delayed": 2})
    sentence = str(raised.value)
    assert sentence.startswith(f"{path} must have the rows that a run wrote, one JSON object a line, got ")
    assert sentence.endswith("; move it away, and the run continues without them") and "\n" not in sentence
    assert len(sentence) < 400 and (" in line 2; " in sentence) == (case not in ("a pipe", "a folder"))


def test_what_was_written_after_a_checkpoint_may_be_damaged(tmp_path):
    """It goes anyway; a disk without power leaves zeros there."""
    path, log = tmp_path / "metrics.jsonl", logs.Log
    path.write_bytes(ROW + ROW + b"\0" * 100 + b"\n" + b"\xff")
    assert len(log(path, True).take_up({"delayed": 2})) == 2
    assert path.read_bytes() == ROW + ROW


def test_a_log_that_is_a_link_is_not_followed_when_it_is_cut(tmp_path):
    precious, path = tmp_path / "precious", tmp_path / "metrics.jsonl"
    precious.write_bytes(ROW + ROW)
    path.symlink_to(precious)
    assert len(logs.Log(path, True).take_up({"delayed": 1})) == 1
    assert precious.read_bytes() == ROW + ROW and path.read_bytes() == ROW


# --- curves -----------------------------------------------------------------------------------------------------------


def curves(folder):
    """Every scalar in event files of a folder: its name, its step and its number."""
    found = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            event, content = Event.FromString(content[12 : 12 + size]), content[12 + size + 4 :]
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


def test_writtenare_what_the_logs_have(tmp_path):
    written = logs.Curves(tmp_path / "curves")
    written.add_metrics(10, dict.fromkeys(MEASURED) | {"loss": 2.5, "tokens_per_second": 1000})
    written.add_diagnostics(12, ROWS | {"loss": 2.0})
    written.close()
    assert set(curves(tmp_path / "curves")) == {
        ("loss", 10, 2.5),
        ("tokens_per_second", 10, 1000.0),
        ("gradient_norm/a", 12, 3.0),
        ("saturated/input", 12, 0.25),  # the worst
        ("underflowed/input", 12, 0.0),
        ("nonfinite/input", 12, 0.0),
        ("headroom/input", 12, 0.5),
    }
    nothing = logs.Curves(None)
    nothing.add_diagnostics(12, ROWS)
    nothing.close()
