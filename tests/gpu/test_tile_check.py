"""The kernels that cast by tile on the device against NumPy; `tile_check.py` alone also times them."""

import pytest
from gpu import kernel_check, tile_check


@pytest.mark.gpu
@pytest.mark.parametrize("check", tile_check.CHECKS, ids=lambda check: check.__name__)
def test_tiles(check):
    report = kernel_check.Report()
    check(report)
    assert report.passed
    assert not report.failures


@pytest.mark.slow
def test_the_script_runs_on_a_cpu():
    assert tile_check.main(["--self-test"]) == 0
