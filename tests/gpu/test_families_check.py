"""Families of models on the device; `families_check.py --self-test` needs no device."""

import pytest
from gpu import families_check, kernel_check


@pytest.mark.gpu
@pytest.mark.parametrize("check", families_check.CHECKS, ids=lambda check: check.__name__)
def test_families(check):
    report = kernel_check.Report()
    check(report)
    assert report.passed
    assert not report.failures
