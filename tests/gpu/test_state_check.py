"""The kernel of the state's update on the device against NumPy; `state_check.py --self-test` needs no device."""

import pytest
from gpu import kernel_check, state_check


@pytest.mark.gpu
@pytest.mark.parametrize("check", state_check.CHECKS, ids=lambda check: check.__name__)
def test_state(check):
    report = kernel_check.Report()
    check(report)
    assert report.passed
    assert not report.failures
