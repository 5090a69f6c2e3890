"""Tokens by kernels in chains on the device; `chain_check.py` alone also times them."""

import pytest
from gpu import chain_check, kernel_check

from jax_fp8.kernels import extension
from jax_fp8.kernels.chain import TARGET


@pytest.mark.gpu
@pytest.mark.skipif(TARGET not in extension.TARGETS, reason="the extension has no chains")
def test_tokens():
    report = kernel_check.Report()
    chain_check.check_tokens(report)
    assert report.passed
    assert not report.failures


@pytest.mark.slow
def test_the_script_runs_on_a_cpu():
    assert chain_check.main(["--self-test"]) == 0
