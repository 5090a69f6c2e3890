"""Peaks of GPUs: what was measured lies below them, and not far."""

import jax
import pytest

from jax_fp8.plan.peaks import PEAKS, peak_of
from jax_fp8.plan.rates import RateTable


def test_what_was_measured_lies_below_the_peak():
    """Of the GPU that has rates, and above half of it: sparsity would double a peak."""
    table = RateTable.for_gpu("h200")
    peak = peak_of(table.gpu)
    assert peak is not None
    for curve, most in ((table.rates.fp8, peak.fp8), (table.rates.fp8_split, peak.fp8), (table.rates.bf16, peak.bf16)):
        assert 0.5 * most < max(rate for _, rate in curve) < most


@pytest.mark.parametrize("kind", PEAKS)
def test_fp8_is_twice_as_fast(kind):
    assert peak_of(kind).fp8 == pytest.approx(2 * peak_of(kind).bf16, rel=2e-3)


def test_a_device_that_nobody_has_looked_up_has_no_peak():
    assert peak_of(jax.devices("cpu")[0].device_kind) is None
    assert peak_of("NVIDIA H300") is None
