"""The table of the worst-scaled tensors."""

from run_logs import freeze, healthy, put_outliers

from jax_fp8.report.diagnosed import gather, sample_of
from jax_fp8.report.ranking import COLUMNS, MOST, worst_tensors


def test_the_worst_come_first_with_last_and_worst_values():
    log = healthy(layers=4)
    freeze(log, "h_1/mlp/down", "input", 12)
    put_outliers(log, "h_2/mlp/down", "input", 30)
    log.tensor(7, "h_3/mlp/down", "kernel").update(nonfinite=0.5, error=None)
    log.tensor(20, "h_0/mlp/down", "kernel")["error"] = 0.12
    table = worst_tensors(gather(map(sample_of, log.diagnostics)))
    assert len(table) == MOST
    names = [name for name, _ in table]
    assert names[:2] == ["kernel of h_3/mlp/down", "input of h_1/mlp/down"]
    assert names[2:4] == ["input of h_2/mlp/down", "kernel of h_0/mlp/down"]
    cells = {name: dict(zip([column for column, *_ in COLUMNS], cells, strict=True)) for name, cells in table}
    assert cells["input of h_2/mlp/down"]["underflowed"] == ("20 %", "20 % at 310")
    assert cells["kernel of h_0/mlp/down"]["error"].worst == "12 % at 210"
    assert cells["kernel of h_0/mlp/down"]["error"].last.startswith("2.")
    assert cells["input of h_1/mlp/down"]["headroom"].worst.endswith(" at 400")
    assert cells["input of h_1/mlp/down"]["amax"].worst == ""


def test_what_was_never_measured_has_no_worst():
    log = healthy(layers=1, count=3)
    for row in log.diagnostics:
        for entry in row["tensors"]:
            entry.update(error=None)
    for _, cells in worst_tensors(gather(map(sample_of, log.diagnostics))):
        assert cells[2] == ("–", "")
