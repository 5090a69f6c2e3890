"""The grouped GEMMs on the device against float64; `grouped_gemm_check.py` alone also times them."""

import pytest
from gpu import grouped_gemm_check, kernel_check

from jax_fp8.kernels import extension
from jax_fp8.kernels.grouped_gemm import TARGETS


@pytest.mark.gpu
@pytest.mark.skipif(not {*TARGETS} <= {*extension.TARGETS}, reason="the extension has no grouped GEMMs")
def test_grouped_products():
    report = kernel_check.Report()
    grouped_gemm_check.check_products(report)
    grouped_gemm_check.check_what_is_behind(report)
    assert report.passed
    assert not report.failures


@pytest.mark.slow
def test_the_script_runs_on_a_cpu():
    assert grouped_gemm_check.main(["--self-test"]) == 0
