"""Experts that are split over two GPUs or more; `experts_check.py --self-test` needs no GPU."""

import pytest
from gpu import experts_check, several_gpus


@pytest.mark.gpu
@pytest.mark.parametrize("check", experts_check.CHECKS, ids=lambda check: check.__name__)
def test_experts(check):
    several_gpus.assert_passes(experts_check, "--skip-timing", "--only", check.__name__)
