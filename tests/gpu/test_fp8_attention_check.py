"""FP8 attention on a GPU; `fp8_attention_check.py --self-test` needs none."""

import pytest
from gpu import fp8_attention_check, report


@pytest.mark.gpu
@pytest.mark.parametrize("check", fp8_attention_check.CHECKS, ids=lambda check: check.__name__)
def test_fp8_attention(check):
    found = report.Report()
    check(found)
    assert found.passed
    assert not found.failures


@pytest.mark.slow
def test_the_script_runs_on_a_cpu():
    assert fp8_attention_check.main(["--self-test"]) == 0
