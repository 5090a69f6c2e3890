"""Every kernel on the device against its oracle; `kernel_check.py` alone also times them."""

import pytest
from gpu import kernel_check


@pytest.mark.gpu
@pytest.mark.parametrize("check", kernel_check.CHECKS, ids=lambda check: check.__name__)
def test_kernels(check):
    report = kernel_check.Report()
    check(report)
    assert report.passed
    assert not report.failures
