"""Pipelines on two GPUs or more against one; `pipeline_check.py --self-test` needs no GPU."""

import pytest
from gpu import pipeline_check, report


@pytest.mark.gpu
def test_pipelines():
    found = report.Report()
    pipeline_check.check_pipelines(found)
    assert found.passed
    assert not found.failures
