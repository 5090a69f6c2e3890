"""Loops of one's own on two GPUs against the step; `own_loop_check.py --self-test` needs no GPU."""

import pytest
from gpu import own_loop_check, several_gpus


@pytest.mark.gpu
@pytest.mark.parametrize("check", own_loop_check.CHECKS, ids=lambda check: check.__name__)
def test_own_loop(check):
    several_gpus.assert_passes(own_loop_check, "--only", check.__name__)
