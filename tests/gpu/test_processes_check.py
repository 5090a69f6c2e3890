"""Several processes on GPUs against one; `processes_check.py --self-test` needs no GPU."""

import pytest
from gpu import processes_check, report


@pytest.mark.gpu
def test_processes():
    if processes_check.count_gpus() < 2:
        pytest.skip("needs two GPUs")
    found = report.Report()
    processes_check.check_processes(found)
    assert found.passed
    assert not found.failures


@pytest.mark.slow
def test_the_script_runs_on_a_cpu():
    assert processes_check.main(["--self-test"]) == 0
