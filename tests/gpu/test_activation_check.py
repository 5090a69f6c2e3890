"""The activation kernels on the device against their oracles; `activation_check.py` alone also times them."""

import pytest
from gpu import activation_check, kernel_check


@pytest.mark.gpu
@pytest.mark.parametrize("check", activation_check.CHECKS, ids=lambda check: check.__name__)
def test_activation_kernels(check):
    report = kernel_check.Report()
    check(report)
    assert report.passed
    assert not report.failures
