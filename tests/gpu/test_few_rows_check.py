"""Products of few rows on the device against float64; `few_rows_check.py` alone also times them."""

import pytest
from gpu import few_rows_check, kernel_check

from jax_fp8.kernels import extension
from jax_fp8.kernels.few_rows_gemm import TARGET


@pytest.mark.gpu
@pytest.mark.skipif(TARGET not in extension.TARGETS, reason="the extension has no GEMM of few rows")
def test_products_of_few_rows():
    report = kernel_check.Report()
    few_rows_check.check_products(report)
    few_rows_check.check_nans(report)
    few_rows_check.check_launches(report)
    assert report.passed
    assert not report.failures


@pytest.mark.slow
def test_the_script_runs_on_a_cpu():
    assert few_rows_check.main(["--self-test"]) == 0
