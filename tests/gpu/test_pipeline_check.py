"""Pipelines on two GPUs or more against one; `pipeline_check.py --self-test` needs no GPU."""

import pytest
from gpu import pipeline_check, several_gpus


@pytest.mark.gpu
def test_pipelines():
    several_gpus.assert_passes(pipeline_check)
