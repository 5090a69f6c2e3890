"""Sections: findings folded by kind, what an event changed, the table."""

import copy
import json
import re

import pytest
from run_logs import freeze, healthy, put_outliers

from jax_fp8.report.findings import find
from jax_fp8.report.maps import tensor_map
from jax_fp8.report.run_folder import read_run
from jax_fp8.report.sections import (
    SHOWN,
    charts_section,
    config_section,
    events_section,
    findings_section,
    map_section,
    tensors_section,
)


@pytest.fixture
def log():
    return healthy()


def test_no_findings_is_said(log, tmp_path):
    folder = read_run(log.write(tmp_path / "run"))
    assert "No findings in 40 diagnosed steps, the log and the events." in findings_section([], folder)


def test_many_findings_of_a_kind_fold_away(tmp_path):
    log = healthy(layers=4)
    for layer in (0, 1):
        for gemm in ("attention/out", "mlp/down", "mlp/gate+up"):
            put_outliers(log, f"h_{layer}/{gemm}", "input", 30)
    folder = read_run(log.write(tmp_path / "run"))
    section = findings_section(find(folder), folder)
    shown, _, folded = section.partition("<details>")
    assert shown.count("has outliers") == SHOWN == folded.count("has outliers")
    assert "3 more of this kind" in folded and section.count('class="remedy"') == 1
    assert "<code>recipe=None</code>" in section


def test_a_finding_leads_to_its_row(log, tmp_path):
    freeze(log, "h_1/mlp/down", "output_gradient", 12)
    folder = read_run(log.write(tmp_path / "run"))
    section = findings_section(find(folder), folder)
    assert 'data-of="delayed" data-layer="h_1/mlp/down" data-tensor="output gradient"' in section
    rows = tensor_map(folder.diagnosed["delayed"])["rows"]
    assert ["h_1/mlp/down", "output gradient"] in rows


def test_curves_of_all_runs_and_marks_of_skipped_steps(log, tmp_path):
    log.metrics += healthy(run="bf16", seed=1).metrics
    log.events = [{"run": "delayed", "step": 27, "event": "skipped"}]
    section = charts_section(read_run(log.write(tmp_path / "run")))
    for text in ("delayed, training", "bf16, validation", "Throughput", "TFLOP/s a device", "GiB", 'class="mark"'):
        assert text in section
    assert section.count("<figure") == 4


def test_what_an_event_changed(log, tmp_path):
    row = copy.deepcopy(log.diagnostics[1]) | {"step": 27, "event": "skipped", "loss": 9.31, "limit": 5.2}
    row |= {"fault": "the batch is odd"}
    row["gradients"][0]["norm"] *= 64
    for entry in row["tensors"]:
        if entry["tensor"] == "output_gradient":
            entry |= {"amax": None, "nonfinite": 0.5}
    log.events = [row]
    section = events_section(read_run(log.write(tmp_path / "run")))
    assert "It was skipped with a loss of 9.31, above the limit of 5.2. The fault: the batch is odd." in section
    assert "At step 20, the last one diagnosed before, the loss was" in section
    rows = [row.replace("<wbr>", "") for row in re.findall("<tr><td>(.*?)</td>", section)]
    assert rows[0] == "output gradient of h_1/mlp/down: not finite" and len(rows) == 5
    assert rows[4] == "gradient of embedding: norm" and "64 x" in section
    assert "4 more tensors or gradients are not finite, 0 more changed" in section


def test_an_event_without_diagnosis_and_one_before_any(log, tmp_path):
    log.events = [{"run": "delayed", "step": step, "event": "skipped", "loss": None} for step in (27, 5)]
    section = events_section(read_run(log.write(tmp_path / "run")))
    assert "with a loss that is not finite" in section
    assert "It was not diagnosed." in section and "No step before it was diagnosed" in section


def test_an_event_that_changed_nothing(log, tmp_path):
    log.events = [log.diagnostics[1] | {"step": 27, "event": "skipped", "loss": 9.0}]
    assert "changed by more than a factor of 2" in events_section(read_run(log.write(tmp_path / "run")))


def test_many_events_are_counted(log, tmp_path):
    log.events = [{"run": "delayed", "step": step, "event": "skipped"} for step in range(100, 130)]
    section = events_section(read_run(log.write(tmp_path / "run")))
    assert section.count("<h3>") == 20 and "10 events more are in events.jsonl" in section


def test_sections_without_their_files(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    folder = read_run(tmp_path)
    assert charts_section(folder) == events_section(folder) == config_section(folder) == ""
    assert "the log and the events alone" in findings_section([], folder)


def test_the_table_and_the_map(log, tmp_path):
    diagnosed = read_run(log.write(tmp_path / "run")).diagnosed["delayed"]
    table = tensors_section("Worst", diagnosed)
    assert table.count("<tr>") == 16 and "15 of 24 tensors. Large: at step 400" in table
    drawn = map_section("Health", "about", "delayed", tensor_map(diagnosed))
    content = json.loads(re.search('<script type="application/json">(.*?)</script>', drawn)[1])
    assert content["rows"][0] == ["h_0/attention/query+key+value", "input"]
    assert drawn.count('data-kind="scale"') == 5 and drawn.count('data-kind="part"') == 4


def test_a_map_in_which_all_is_well_is_closed(log, tmp_path):
    diagnosed = read_run(log.write(tmp_path / "run")).diagnosed["delayed"]
    drawn = map_section("Health", "about", "delayed", tensor_map(diagnosed))
    assert '<details><summary><span class="level good">all well</span> 24 tensors, steps 10 to 400: open' in drawn
    freeze(log, "h_1/mlp/down", "output_gradient", 12)  # negative control
    diagnosed = read_run(log.write(tmp_path / "other")).diagnosed["delayed"]
    drawn = map_section("Health", "about", "delayed", tensor_map(diagnosed))
    assert "<details open><summary>24 tensors, steps 10 to 400</summary>" in drawn


def test_a_map_with_a_value_that_is_not_finite_is_open(log, tmp_path):
    log.tensor(5, "h_1/mlp/down", "output_gradient").update(nonfinite=0.25)
    diagnosed = read_run(log.write(tmp_path / "run")).diagnosed["delayed"]
    assert not tensor_map(diagnosed)["quiet"]
