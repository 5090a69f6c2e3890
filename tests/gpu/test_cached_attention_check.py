"""The attention of a new token on the device by float64; `cached_attention_check.py` also times it."""

import pytest
from gpu import cached_attention_check, report


@pytest.mark.gpu
@pytest.mark.parametrize("check", cached_attention_check.CHECKS, ids=lambda check: check.__name__)
def test_cached_attention(check):
    found = report.Report()
    check(found)
    assert not found.failures


@pytest.mark.slow
def test_the_script_runs_on_a_cpu():
    assert cached_attention_check.main(["--self-test"]) == 0
