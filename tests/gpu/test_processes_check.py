"""Several processes on GPUs against one; `processes_check.py --self-test` needs no GPU."""

import pytest
from gpu import processes_check, several_gpus


@pytest.mark.gpu
def test_processes():
    several_gpus.assert_passes(processes_check)


@pytest.mark.slow
def test_the_script_runs_on_a_cpu():
    assert processes_check.main(["--self-test"]) == 0
