"""The kernels of norms on the device against NumPy; `norm_check.py` alone also times them, and has a self-test."""

import pytest
from gpu import kernel_check, norm_check


@pytest.mark.gpu
@pytest.mark.parametrize("check", norm_check.CHECKS, ids=lambda check: check.__name__)
def test_norms(check):
    report = kernel_check.Report()
    check(report)
    assert report.passed
    assert not report.failures
