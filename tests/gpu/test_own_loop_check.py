"""Loops of one's own on two GPUs against the step; `own_loop_check.py --self-test` needs no GPU."""

import pytest
from gpu import own_loop_check, report


@pytest.mark.gpu
@pytest.mark.parametrize("check", own_loop_check.CHECKS, ids=lambda check: check.__name__)
def test_own_loop(check):
    found = report.Report()
    check(found)
    assert found.passed
    assert not found.failures
