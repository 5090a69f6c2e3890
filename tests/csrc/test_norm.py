"""csrc/norm.cu on the CPU: the cast bit for bit, from the kernel's statistics; these and gradients against float64."""

from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
import reference
from combinations import every_pair, name_of
from emulation import ONLY_BFLOAT16, EmulationError, InPlace, Input, Result, compile_for_cpu, planted
from entries import NORM
from reference import assert_close, assert_same_bits

NORMS = ["layernorm", "rmsnorm"]
SOURCES = [np.float32, ml_dtypes.bfloat16, np.float16]  # in the order of SourceType
FORMATS = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]  # in the order of Fp8Type
SCALAR = Result((), np.float32)
EPSILON = 1e-3
SCALE = 0.0123

# A device without clusters; then one with shared memory for 64 columns only: the others are read again.
NO_CLUSTERS = (("kernel_launch.h", "compiled.ptxVersion >= 90", "false"),)
LITTLE_SHARED = (*NO_CLUSTERS, ("norm.cu", "(available - kStatic - kSlices)", "(64 * kColumnBytes)"))
PARTS, CLUSTER, ROWS = "device/norm_parts.cuh", "device/norm_cluster.cuh", "device/norm.cuh"
BACKWARD = "device/norm_backward.cuh"

# Rows of a block as long as 32 vectors: the other vectors are further passes. Few threads are then used by no row.
MANY_PASSES = (
    ("norm.cu", "divide_up(vectors, norm_backward::kManyThreads)", "divide_up(vectors, kWarp)"),
    ("norm.cu", "if (arguments.cols <= kFew", "if (arguments.cols < 0 * kFew"),
)


def array(seed, *shape, dtype=np.float32, mean=0.0):
    return (np.random.default_rng(seed).normal(size=shape) + mean).astype(dtype)


def parameters(cols, norm):
    return array(7, cols, mean=1.0), array(8, cols) if norm == "layernorm" else None


def quantize(x, norm, dtype=FORMATS[0], source=SCALE, how=(0, False), wanted=(True, True), changes=(), offset=0):
    rows, cols = x.shape
    norm_scale, norm_bias = parameters(cols, norm)
    values = Result((rows, cols), dtype, offset) if wanted[0] else None
    values_t = Result((cols, rows), dtype, offset) if wanted[1] else None
    column = Result((rows, 1), np.float32)
    results = [values, values_t, SCALAR, SCALAR, None if norm_bias is None else column, column]
    got = compile_for_cpu("norm.cu", NORM, changes).call(
        "norm_quantize",
        *(Input(x, offset * x.dtype.itemsize), SOURCES.index(x.dtype), norm_scale, norm_bias, EPSILON, rows, cols),
        *(np.asarray(source, np.float32), *how, FORMATS.index(dtype), *results),
    )
    got = iter(got)
    return [next(got) if result is not None else None for result in results]


def amax(x, norm, changes=()):
    rows, cols = x.shape
    (got,) = compile_for_cpu("norm.cu", NORM, changes).call(
        "norm_amax", x, SOURCES.index(x.dtype), *parameters(cols, norm), EPSILON, rows, cols, SCALAR
    )
    return got


def statistics(x, norm):
    """Mean and 1 / deviation in float64."""
    x = x.astype(np.float64)
    mean = x.mean(axis=1, keepdims=True) if norm == "layernorm" else np.zeros((x.shape[0], 1))
    return mean, 1 / np.sqrt(np.square(x - mean).mean(axis=1, keepdims=True) + EPSILON)


def normalized(x, norm, mean, rstd):
    """What the kernel makes of its own statistics: float32 after every operation, but product and bias together."""
    norm_scale, norm_bias = parameters(x.shape[1], norm)
    with np.errstate(invalid="ignore"):
        centered = x.astype(np.float32) - (0 if mean is None else mean)
        y = (centered * rstd).astype(np.longdouble) * norm_scale + (-0.0 if norm_bias is None else norm_bias)
        return y.astype(np.float32).astype(x.dtype)


def check_quantized(x, norm, dtype, scale, got):
    values, values_t, measured, used, mean, rstd = got
    expected_mean, expected_rstd = statistics(x, norm)
    np.testing.assert_allclose(rstd, expected_rstd, rtol=1e-6)
    if norm == "layernorm":
        np.testing.assert_allclose(mean, expected_mean, atol=1e-6, rtol=1e-6)
    y = normalized(x, norm, mean, rstd)
    expected, expected_amax = reference.quantize(y, dtype, scale)
    assert_same_bits(measured, expected_amax)
    assert_same_bits(used, np.float32(scale))
    for array, wanted in ((values, expected), (values_t, expected.T)):
        if array is not None:
            assert_same_bits(array, wanted)


# Clusters of 1, 2, 4, 8 and 16 blocks, which share the columns equally or not, with rows for all of their warps or not;
# for float32 twice as many. Then rows that are too wide for float32, and shapes without vectors.
CLUSTERS = [(16, 16), (48, 208), (32, 304), (32, 528), (32, 1024), (48, 1040), (16, 3088), (16, 5136)]


@pytest.mark.parametrize(
    ("shape", "source", "norm"),
    every_pair([*CLUSTERS, (33, 64), (1, 100), (7, 1), (65, 31), (32, 520)], SOURCES, NORMS),
    ids=name_of,
)
def test_quantize(shape, source, norm):
    x = array(1, *shape, dtype=source, mean=0.5)
    for dtype in FORMATS if x.size < 50000 else FORMATS[:1]:
        check_quantized(x, norm, dtype, SCALE, quantize(x, norm, dtype))


@pytest.mark.parametrize("source", SOURCES[:2])
@pytest.mark.parametrize("changes", [NO_CLUSTERS, LITTLE_SHARED])
def test_devices_without_clusters(source, changes):
    for norm in ("layernorm", "rmsnorm"):
        for shape in [(32, 208), (16, 3088)]:
            x = array(1, *shape, dtype=source, mean=0.5)
            check_quantized(x, norm, FORMATS[0], SCALE, got := quantize(x, norm, changes=changes))
            assert_same_bits(amax(x, norm, changes), got[2])


@pytest.mark.parametrize("shape", [(16, 16), (16, 8192), (16, 8208), (24, 64)])
def test_which_shapes_are_for_clusters(shape):
    twice = ((PARTS, "_with_nothing();", "_with_nothing(), arrive_at_cluster();"), *ONLY_BFLOAT16)
    mistake_shows = pytest.raises(EmulationError, match="an arrival at the cluster's barrier that follows another")
    with mistake_shows if shape[0] == 16 and shape[1] <= 8192 else nullcontext():
        quantize(array(1, *shape, dtype=ml_dtypes.bfloat16), "layernorm", changes=twice)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
@pytest.mark.parametrize("shape", [(32, 80), (48, 1040), (33, 65)])
def test_one_orientation(wanted, shape):
    x = array(1, *shape, dtype=ml_dtypes.bfloat16, mean=0.5)
    got = quantize(x, "layernorm", wanted=wanted)
    assert [array is not None for array in got[:2]] == list(wanted)
    check_quantized(x, "layernorm", FORMATS[0], SCALE, got)


@pytest.mark.parametrize("norm", NORMS)
def test_amax(norm):
    for source in SOURCES:
        for shape in [(32, 80), (48, 1040), (33, 65), (16, 3088), (0, 16)]:
            x = array(1, *shape, dtype=source, mean=0.5)
            assert_same_bits(amax(x, norm), quantize(x, norm)[2])


def test_where_the_scale_comes_from():
    x = array(1, 16, 32, dtype=np.float16)
    sources = np.float32([3.0, 0.1, 1e-3])
    for row, scale in enumerate(sources):
        check_quantized(x, "rmsnorm", FORMATS[1], scale, quantize(x, "rmsnorm", FORMATS[1], sources, (row, False)))
    scale = reference.scale_from_amax(np.float32(3.3), FORMATS[0])
    check_quantized(x, "rmsnorm", FORMATS[0], scale, quantize(x, "rmsnorm", source=3.3, how=(0, True)))


def test_no_rows_and_arrays_that_are_not_aligned():
    check_quantized(x := array(1, 0, 16), "layernorm", FORMATS[0], SCALE, quantize(x, "layernorm"))
    for offset in (1, 8):
        x = array(1, 16, 32, dtype=ml_dtypes.bfloat16)
        check_quantized(x, "layernorm", FORMATS[0], SCALE, quantize(x, "layernorm", offset=offset))


@pytest.mark.parametrize("shape", [(16, 64), (16, 1040), (5, 7)])
@pytest.mark.parametrize("norm", NORMS)
def test_a_row_that_is_not_finite_spoils_no_other(norm, shape):
    x = array(1, *shape, dtype=ml_dtypes.bfloat16)
    clean = quantize(x, norm)
    x[2, 3], x[4, 0] = np.nan, np.inf
    values, values_t, measured, _, _, rstd = quantize(x, norm)
    others = np.delete(np.arange(shape[0]), [2, 4])
    assert_same_bits(values[others], clean[0][others])
    assert_same_bits(values_t, values.T)
    assert list(values[2].view(np.uint8)) == [0x7F] * shape[1] and np.isnan(rstd[2])
    assert np.isnan(values[4, 0].astype(np.float32))
    assert_same_bits(measured, reference.amax(normalized(x, norm, *(quantize(x, norm)[4:]))))


# ---- backward --------------------------------------------------------------------------------------------------------


def backward(dy, x, norm, residual=None, partials=5, changes=(), offset=0):
    rows, cols = x.shape
    mean, rstd = (array.astype(np.float32) for array in statistics(x, norm))
    norm_scale, norm_bias = parameters(cols, norm)
    sums, parts = Result((cols,), np.float32), np.full((partials, cols), np.nan, np.float32)
    has_bias = norm_bias is not None
    # More partial sums than blocks are not written: they are no results here, and whoever reads them finds NaN.
    return compile_for_cpu("norm.cu", NORM, changes).call(
        "norm_backward",
        *(Input(dy, offset), Input(x, offset), residual, SOURCES.index(x.dtype)),
        *(norm_scale, mean if has_bias else None, rstd, partials, rows, cols, Result(x.shape, x.dtype, offset), sums),
        *(sums if has_bias else None, InPlace(parts), InPlace(parts) if has_bias else None),
    )[: 2 + has_bias]


def gradients(dy, x, norm, residual):
    """By the formulas of the papers, in float64, from the statistics as the kernel gets them."""
    norm_scale, _ = parameters(x.shape[1], norm)
    mean, rstd = (array.astype(np.float32).astype(np.float64) for array in statistics(x, norm))
    dy, y = dy.astype(np.float64), (x.astype(np.float64) - mean) * rstd
    g = dy * norm_scale
    dx = g - y * np.mean(g * y, axis=1, keepdims=True)
    if norm == "layernorm":
        dx = dx - np.mean(g, axis=1, keepdims=True)
    dx = dx * rstd + (0 if residual is None else residual.astype(np.float64))
    return [dx, np.sum(dy * y, axis=0), *([np.sum(dy, axis=0)] if norm == "layernorm" else [])]


def check_backward(dy, x, norm, residual, got):
    expected = gradients(dy, x, norm, residual)
    for array, wanted in zip(got[1:], expected[1:], strict=True):
        assert_close(array, wanted, "float32")
    if x.dtype == np.float32:
        assert_close(got[0], expected[0], "float32")
    else:  # rounded once: the same bits but next to a tie, or where terms cancel
        same = np.mean(got[0] == expected[0].astype(x.dtype))
        assert same > 0.99, f"{same:.4f} of dx are rounded as float64 would be"
        assert_close(got[0], expected[0], np.dtype(x.dtype).name)


# One row per block and more, rows that are left over, tails of columns, many threads; then shapes without vectors.
@pytest.mark.parametrize(
    ("shape", "source", "norm"),
    every_pair([(24, 64), (43, 520), (9, 3080), (1, 16), (33, 65), (7, 3), (3, 300)], SOURCES, NORMS),
    ids=name_of,
)
def test_backward(shape, source, norm):
    x, dy, residual = (array(seed, *shape, dtype=source, mean=0.5) for seed in (1, 2, 3))
    for added in (None, residual):
        check_backward(dy, x, norm, added, backward(dy, x, norm, added))


@pytest.mark.parametrize("source", SOURCES[:2])
def test_backward_in_several_passes(source):
    for cols in (256, 520, 1600):
        x, dy, residual = (array(seed, 11, cols, dtype=source, mean=0.5) for seed in (1, 2, 3))
        got = backward(dy, x, "layernorm", residual, changes=MANY_PASSES)
        check_backward(dy, x, "layernorm", residual, got)


def test_backward_of_nothing_and_of_arrays_that_are_not_aligned():
    x = array(1, 0, 16)
    dx, dscale, dbias = backward(x, x, "layernorm")
    assert dx.shape == (0, 16) and not dscale.any() and not dbias.any()
    x, dy = (array(seed, 16, 32, dtype=ml_dtypes.bfloat16) for seed in (1, 2))
    check_backward(dy, x, "layernorm", None, backward(dy, x, "layernorm", offset=2))


@pytest.mark.parametrize("source", [np.float32, ml_dtypes.bfloat16])
def test_what_is_left_out_would_be_noticed(source):
    x, dy, residual = (array(seed, 24, 64, dtype=source, mean=0.5) for seed in (1, 2, 3))
    got = backward(dy, x, "layernorm", residual)
    with pytest.raises(AssertionError, match=r"of dx are rounded|relative error"):
        check_backward(dy, x, "layernorm", None, got)
    with pytest.raises(AssertionError, match="relative error"):
        check_backward(dy, x, "layernorm", residual, [got[0], got[1], got[2] * 0])


UNTIL = "  wait_for_cluster();  // until"
MISTAKES = {
    "no wait for those who have not begun": (PARTS, UNTIL, UNTIL.replace("wait", "if (place.block == 9) wait")),
    "no barrier before the parts are read": (PARTS, "  arrive_at_cluster();\n  wait_for_cluster();\n", ""),
    "a block that ends early": (PARTS, UNTIL, UNTIL.replace("wait", "if (place.block == 2) return;\n  wait")),
    "parts in the place of others": (PARTS, "publish(part, known.parts[place.block]", "publish(part, known.parts[0]"),
    "parts of equal weight": (PARTS, "count[k] = static_cast<float>(", "count[k] = 260; (void)("),
    "no distance of means": (PARTS, "__fmul_rn(count[k], distance), distance, part", "0.0f, distance, part"),
    "columns beyond the end": (PARTS, "return col_of(v) < end;", "return end > 0;"),
    "rows beyond the end": (PARTS, "has_rows ? place.cols : 0", "place.cols"),
    "no barrier before the statistics are read": (PARTS, "  __syncwarp();", ""),
    "no barrier before the columns are read": (CLUSTER, "    __syncthreads();\n", ""),
    "another swizzle where columns are written": (CLUSTER, "+ warp) ^ lane]", "+ warp) ^ lane / 2]"),
    "halves of parameters": (PARTS, "kept[which][four & 1]", "kept[which][~four & 1]"),
    "values that are not rounded": (CLUSTER, "round_all<T>(x);", ""),
    "an amax that is not rounded": (CLUSTER, "to_float(from_float<T>(thread_amax))", "thread_amax"),
    "rows: no barrier before the patches": (ROWS, "  __syncthreads();\n\n  // Column c", "\n\n  // Column c"),
    "rows: no barrier after the transpose": (ROWS, "    }\n    __syncwarp();\n  }", "    }\n  }"),
    "rows: another swizzle": (ROWS, "column % kVectorWidth ^ of_group", "column % kVectorWidth"),
}  # fmt: skip


# 48 rows in clusters of 4, one block with more columns than the others; in blocks of rows, a part of a slice.
@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    shape, others = ((48, 1040), ()) if MISTAKES[mistake][0] in (PARTS, CLUSTER) else ((32, 1104), NO_CLUSTERS)
    x = array(1, *shape, dtype=ml_dtypes.bfloat16, mean=0.5)
    changes = (MISTAKES[mistake], *others, *ONLY_BFLOAT16)
    with pytest.raises((EmulationError, AssertionError)):
        check_quantized(x, "layernorm", FORMATS[0], SCALE, quantize(x, "layernorm", changes=changes))


BACKWARD_MISTAKES = {
    "no barrier in the sums": ("device/reduce.cuh", "  __syncthreads();\n  const bool filled", "  const bool filled"),
    "scratch used twice": (BACKWARD, "turn ^= 1;", ""),
    "rows left over": (BACKWARD, "first_row + r < g.rows && col", "col"),
    "the second half of the columns": (BACKWARD, "sums_of(pass)[half * threads]", "sums_of(pass)[0]"),
    "a partial sum too few": ("device/column_sums.cuh", "i = row; i < parts", "i = row; i < parts - 1"),
}


@pytest.mark.parametrize("mistake", planted(BACKWARD_MISTAKES))
def test_a_mistake_of_the_backward_is_noticed(mistake):
    x, dy = (array(seed, 43, 520, dtype=ml_dtypes.bfloat16, mean=0.5) for seed in (1, 2))
    with pytest.raises((EmulationError, AssertionError)):
        got = backward(dy, x, "layernorm", changes=(BACKWARD_MISTAKES[mistake], *ONLY_BFLOAT16))
        check_backward(dy, x, "layernorm", None, got)
