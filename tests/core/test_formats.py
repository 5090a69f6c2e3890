"""The two formats, and what a pair of them may be."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from jax_fp8.core.formats import E4M3, E5M2, HYBRID, Format, fp8_max

pytestmark = pytest.mark.versions


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_max_is_the_largest_finite_of_all_bit_patterns(dtype):
    every_value = np.arange(256, dtype=np.uint8).view(np.dtype(dtype)).astype(np.float32)
    largest = fp8_max(dtype)
    assert largest == np.max(every_value[np.isfinite(every_value)])
    assert largest.dtype == np.float32
    assert fp8_max(np.dtype(dtype)) == largest  # as an array spells its dtype


def test_the_formats_are_not_each_other():
    assert (fp8_max(E4M3), fp8_max(E5M2)) == (448, 57344)


def test_hybrid_is_precise_forward_and_wide_backward():
    assert Format(forward=E4M3, backward=E5M2) == HYBRID
    assert (HYBRID.forward, HYBRID.backward) == (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


def test_format_is_a_value():
    other = Format(forward=E4M3, backward=E4M3)
    assert {HYBRID: "hybrid", other: "e4m3"}[Format(forward=E4M3, backward=E5M2)] == "hybrid"
    assert other != HYBRID
    assert hash(Format(np.dtype(E4M3), np.dtype(E5M2))) == hash(HYBRID)  # as an array spells its dtype
    with pytest.raises(dataclasses.FrozenInstanceError):
        HYBRID.backward = E4M3


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        (E5M2, E5M2, r"Format\.forward must be E4M3, got E5M2.*pass jax_fp8\.HYBRID"),
        (np.float16, E5M2, r"Format\.forward must be E4M3 or E5M2, got .*float16.*pass jax_fp8\.E4M3"),
        (E4M3, ml_dtypes.float8_e4m3b11fnuz, r"Format\.backward must be E4M3 or E5M2, got .*b11.*pass jax_fp8\.E4M3"),
        (E4M3, None, r"Format\.backward must be E4M3 or E5M2, got None"),
    ],
)
def test_format_refuses(forward, backward, message):
    with pytest.raises(ValueError, match=message):
        Format(forward=forward, backward=backward)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2fnuz])
def test_fp8_max_refuses_other_dtypes(dtype):
    with pytest.raises(
        ValueError, match=f"dtype must be E4M3 or E5M2, got .*{np.dtype(dtype).name}.*pass jax_fp8.E4M3"
    ):
        fp8_max(dtype)
