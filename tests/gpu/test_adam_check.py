"""Adam's kernel on the device against NumPy and the reference; `adam_check.py --self-test` needs no device."""

import pytest
from gpu import adam_check, kernel_check


@pytest.mark.gpu
@pytest.mark.parametrize("check", adam_check.CHECKS, ids=lambda check: check.__name__)
def test_adam(check):
    report = kernel_check.Report()
    check(report)
    assert report.passed
    assert not report.failures
