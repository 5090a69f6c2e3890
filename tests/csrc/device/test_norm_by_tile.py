"""csrc/device/norm_by_tile.cuh on the CPU, by what csrc/norm.cu makes of it: bit for bit against NumPy.

The statistics are those of the norm that casts with one scale; tests/csrc/test_norm.py compares them with float64.
"""

import ml_dtypes
import numpy as np
import pytest
from by_tile import TileRule
from emulation import ONLY_BFLOAT16, ORDERS, EmulationError, Input, Result, compile_for_cpu, planted
from entries import NORM
from reference import assert_same_bits

SOURCES = [np.float32, ml_dtypes.bfloat16, np.float16]  # in the order of SourceType
NORMS = ["layernorm", "rmsnorm"]
EPSILON = 1e-3
BY_LINE = TileRule()


def array(seed, *shape, dtype=np.float32, mean=0.0):
    return (np.random.default_rng(seed).normal(size=shape) + mean).astype(dtype)


def problem_of(x, norm, offset=0):
    cols = x.shape[1]
    norm_scale, norm_bias = array(7, cols, mean=1.0), array(8, cols) if norm == "layernorm" else None
    return Input(x, offset * x.itemsize), SOURCES.index(x.dtype), norm_scale, norm_bias, EPSILON, *x.shape


def statistics(rows, norm):
    column = Result((rows, 1), np.float32)
    return [column if norm == "layernorm" else None, column]


def run(x, norm, rule=BY_LINE, changes=(), offset=0, orders=ORDERS):
    """The cast, the mean (None of RMSNorm) and 1 / deviation."""
    results = [*rule.results(*x.shape, offset), *statistics(x.shape[0], norm)]
    arguments = (*problem_of(x, norm, offset), *rule.attributes(), *results)
    got = iter(compile_for_cpu("norm.cu", NORM, changes).call("by_tile", *arguments, orders=tuple(orders)))
    cast = rule.filled(got)
    return cast, next(got) if norm == "layernorm" else None, next(got)


def normalized(x, norm, mean, rstd):
    """Float32 after every operation, but product and bias together; then rounded as x is."""
    _, _, norm_scale, norm_bias, *_ = problem_of(x, norm)
    with np.errstate(invalid="ignore"):
        centered = x.astype(np.float32) - (0 if mean is None else mean)
        y = (centered * rstd).astype(np.longdouble) * norm_scale + (-0.0 if norm_bias is None else norm_bias)
        return y.astype(np.float32).astype(x.dtype)


def check(x, norm, rule=BY_LINE, offset=0, **how):
    cast, mean, rstd = run(x, norm, rule, offset=offset, **how)
    scalar = Result((), np.float32)
    arguments = (*problem_of(x, norm, offset), np.float32([0.1]), scalar, scalar, *statistics(x.shape[0], norm))
    amax, _, *wanted = compile_for_cpu("norm.cu", NORM).call("by_one", *arguments, orders=["forward"])
    assert_same_bits(cast[2], amax)
    for got, one in zip([rstd, mean], wanted[::-1], strict=False):
        assert_same_bits(got, one)
    rule.check(normalized(x, norm, mean, rstd), cast)


# A cluster of one block and of several, then rows and columns that no vector fits.
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(144, 208), (16, 1040), (33, 165), (1, 100), (131, 1), (0, 16)], ids=str)
def test_shapes(shape, source, norm):
    check(array(1, *shape, dtype=source, mean=0.5), norm)


@pytest.mark.parametrize("shape", [(144, 208), (33, 165)], ids=str)
def test_squares_and_one_orientation(shape):
    x = array(1, *shape, dtype=ml_dtypes.bfloat16, mean=0.5)
    rules = [TileRule(square_t=True, power_2_scale=True), TileRule(True, True), TileRule(columnwise=False)]
    for rule in (*rules, TileRule(rowwise=False)):
        check(x, "layernorm", rule, orders=["random"])


def test_arrays_that_are_not_aligned():
    for offset in (1, 8):
        check(array(1, 32, 144, dtype=ml_dtypes.bfloat16), "layernorm", offset=offset)


@pytest.mark.parametrize("shape", [(16, 144), (5, 7)], ids=str)
def test_a_row_that_is_not_finite_changes_no_scale_of_another(shape):
    x = array(1, *shape, dtype=ml_dtypes.bfloat16)
    clean, *_ = run(x, "layernorm")
    x[2, 3] = np.nan
    check(x, "layernorm")
    got, *_ = run(x, "layernorm")
    assert_same_bits(np.delete(got[3], 2, axis=1), np.delete(clean[3], 2, axis=1))
    assert np.all(got[3][:, 2] == 1) and np.all(np.isfinite(got[4]))


PRODUCER = "device/norm_by_tile.cuh"
ONE_VALUE = "x[j] = normalized(x[j], row_mean, row_rstd, norm_scale[j], norm_bias[j]);"
MISTAKES = {
    "the mean of the first row": (PRODUCER, "mean_of_row(row + r)", "mean_of_row(row)"),
    "the deviation of the first row": (PRODUCER, "__ldg(rstd + row + r)", "__ldg(rstd + row)"),
    "no bias": (PRODUCER, ONE_VALUE, ONE_VALUE.replace("norm_bias[j]", "kNoBias")),
    "parameters of the first columns": (PRODUCER,
        "load_vector(input.norm_scale + col)", "load_vector(input.norm_scale)"),
    "any: not rounded": (PRODUCER, "to_float(from_float<T>(", "(("),
    "statistics after the cast": ("norm.cu",
        ".mean = arguments.mean, .rstd = arguments.rstd}", ".mean = nullptr, .rstd = nullptr}"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    x = array(1, *((33, 165) if mistake.startswith("any") else (144, 208)), dtype=ml_dtypes.bfloat16, mean=0.5)
    with pytest.raises((AssertionError, EmulationError)):
        check(x, "layernorm", changes=(MISTAKES[mistake], *ONLY_BFLOAT16))
