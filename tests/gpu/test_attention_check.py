"""Attention and dropout on a GPU; `attention_check.py --self-test` needs none."""

import pytest
from gpu import attention_check, report


@pytest.mark.gpu
@pytest.mark.parametrize("check", attention_check.CHECKS, ids=lambda check: check.__name__)
def test_attention(check):
    found = report.Report()
    check(found)
    assert found.passed
    assert not found.failures


@pytest.mark.slow
def test_the_script_runs_on_a_cpu():
    assert attention_check.main(["--self-test"]) == 0
