"""The block-scaled GEMM on the device against float64; `tile_gemm_check.py` alone also times it."""

import pytest
from gpu import kernel_check, tile_gemm_check


@pytest.mark.gpu
def test_block_scaled_products():
    report = kernel_check.Report()
    tile_gemm_check.check_gemm(report)
    assert report.passed
    assert not report.failures


@pytest.mark.slow
def test_the_script_runs_on_a_cpu():
    assert tile_gemm_check.main(["--self-test"]) == 0
