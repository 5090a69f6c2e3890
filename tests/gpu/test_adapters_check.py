"""Adapters on frozen kernels on the device; `adapters_check.py --self-test` needs no device."""

import pytest
from gpu import adapters_check, kernel_check


@pytest.mark.gpu
@pytest.mark.parametrize("check", adapters_check.CHECKS, ids=lambda check: check.__name__)
def test_adapters(check):
    report = kernel_check.Report()
    check(report)
    assert report.passed
    assert not report.failures
