"""Products with a carried state on the device; `products_check.py --self-test` needs no device."""

import pytest
from gpu import kernel_check, products_check


@pytest.mark.gpu
@pytest.mark.parametrize("check", products_check.CHECKS, ids=lambda check: check.__name__)
def test_products(check):
    report = kernel_check.Report()
    check(report)
    assert report.passed
    assert not report.failures


def test_self_test():
    assert products_check.main(["--self-test"]) == 0
