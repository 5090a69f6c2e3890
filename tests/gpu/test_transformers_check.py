"""Conversion from and to Hugging Face against transformers, where it is installed; it needs no GPU."""

import pytest
from gpu import report

pytest.importorskip("torch")
pytest.importorskip("transformers")
transformers_check = pytest.importorskip("gpu.transformers_check")


@pytest.mark.parametrize("check", transformers_check.CHECKS, ids=lambda check: check.__name__)
def test_conversion(check):
    found = report.Report()
    check(found)
    assert found.passed
    assert not found.failures
