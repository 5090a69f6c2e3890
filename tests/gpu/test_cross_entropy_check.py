"""The kernel of the loss on the device against NumPy; `cross_entropy_check.py` also times it, and has a self-test."""

import pytest
from gpu import cross_entropy_check, kernel_check


@pytest.mark.gpu
@pytest.mark.parametrize("check", cross_entropy_check.CHECKS, ids=lambda check: check.__name__)
def test_cross_entropy(check):
    report = kernel_check.Report()
    check(report)
    assert report.passed
    assert not report.failures
