"""csrc/device/norm_by_tile.cuh and norm_cluster_by_tile.cuh on the CPU, by what csrc/norm.cu makes of them: bit for bit
against NumPy.

The statistics are those of the norm that casts with one scale; tests/csrc/test_norm.py compares them with float64.
"""

from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
from by_tile import TileRule
from combinations import every_pair, name_of
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


# Clusters of both bands, or one that has rows, of 1, 2, 4 and 8 blocks side by side; blocks with as many columns as
# they can have, fewer, and a part of a tile. For float32 twice as many blocks, but for 768 columns, which are 6 tiles
# for 4, and for 4096.
CLUSTERS = [(144, 208), (16, 128), (128, 256), (272, 768), (80, 1024), (208, 2048), (16, 4096)]
# Two kernels: a tile that two blocks would have, more columns than a cluster; then what no vector fits.
OTHERS = [(144, 1040), (16, 4096 + 128), (33, 165), (1, 100), (131, 1), (0, 16)]


@pytest.mark.parametrize(("shape", "source", "norm"), every_pair([*CLUSTERS, *OTHERS], SOURCES, NORMS), ids=name_of)
def test_shapes(shape, source, norm):
    check(array(1, *shape, dtype=source, mean=0.5), norm)


@pytest.mark.parametrize("source", SOURCES[:2], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("how", ["by line", "unaligned", "square", "square_t"])
def test_which_problems_are_for_clusters(how, source):
    """A wait too many is a mistake that shows where the kernel of clusters runs, and nowhere else."""
    twice = ((CLUSTER, WAIT, f"{WAIT}\n{WAIT}"),)
    rule = TileRule(square=how == "square", square_t=how == "square_t")
    for shape in [*CLUSTERS, *OTHERS] if how == "by line" else [(144, 208)]:
        x = array(1, *shape, dtype=source)
        mistake_shows = pytest.raises(EmulationError, match="a wait for the cluster's barrier without an arrival")
        is_for_them = how == "by line" and shape in CLUSTERS and (source != np.float32 or shape[1] not in (768, 4096))
        with mistake_shows if is_for_them else nullcontext():
            run(x, "layernorm", rule, twice, offset=how == "unaligned", orders=["forward"])


NO_CLUSTERS = "kernel_launch.h", "compiled.ptxVersion >= 90", "false"
NO_ROOM = "norm.cu", "at_once == 0", "at_once <= 2"


@pytest.mark.parametrize("change", [NO_CLUSTERS, NO_ROOM], ids=["none", "no room"])
def test_devices_without_clusters_or_with_small_ones(change):
    """Statistics of other kernels may differ in the last bit: the cast is that of the statistics that are written."""
    x = array(1, 16, 4096, dtype=ml_dtypes.bfloat16, mean=0.5)
    twice = (CLUSTER, WAIT, f"{WAIT}\n{WAIT}")  # shows if it is run all the same
    cast, mean, rstd = run(x, "layernorm", changes=(change, twice), orders=["random"])
    BY_LINE.check(normalized(x, "layernorm", mean, rstd), cast)
    np.testing.assert_allclose(mean[:, 0], x.astype(np.float64).mean(axis=1), rtol=1e-6)


@pytest.mark.parametrize("shape", [(144, 208), (80, 768), (33, 165)], ids=str)
def test_squares_and_one_orientation(shape):
    x = array(1, *shape, dtype=ml_dtypes.bfloat16, mean=0.5)
    rules = [TileRule(square_t=True, power_2_scale=True), TileRule(True, True), TileRule(columnwise=False)]
    for rule in (*rules, TileRule(rowwise=False)):
        check(x, "layernorm", rule, orders=["random"])


def test_arrays_that_are_not_aligned():
    for offset in (1, 8):
        check(array(1, 32, 144, dtype=ml_dtypes.bfloat16), "layernorm", offset=offset)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(144, 768), (16, 1040), (9, 140)], ids=str)
def test_special_values(shape, norm):
    """Rows of zeros and of one number, whose tiles are those of the bias or nothing but zeros; infinities and NaNs,
    also where a row's tiles are in different blocks, and columns that have no other values."""
    x = array(1, *shape, dtype=ml_dtypes.bfloat16)
    x[0], x[1], x[2, 3], x[3, -1], x[4, 5], x[4, -2] = 0, 3, np.inf, np.nan, -np.inf, np.nan
    x[5:, 7], x[6, 130] = 0, 3e38
    for rule in (BY_LINE, TileRule(amax_epsilon=0.7, margin=1, power_2_scale=True)):
        check(x, norm, rule, orders=["random"])
    x[:, 8] = np.nan
    check(x, norm, orders=["random"])


@pytest.mark.parametrize("shape", [(16, 144), (5, 7)], ids=str)
def test_a_row_that_is_not_finite_changes_no_scale_of_another(shape):
    x = array(1, *shape, dtype=ml_dtypes.bfloat16)
    clean, *_ = run(x, "layernorm")
    x[2, 3] = np.nan
    check(x, "layernorm")
    got, *_ = run(x, "layernorm")
    assert_same_bits(np.delete(got[3], 2, axis=1), np.delete(clean[3], 2, axis=1))
    assert np.all(got[3][:, 2] == 1) and np.all(np.isfinite(got[4]))


PRODUCER, CLUSTER = "device/norm_by_tile.cuh", "device/norm_cluster_by_tile.cuh"
ONE_VALUE = "x[j] = normalized(x[j], row_mean, row_rstd, norm_scale[j], norm_bias[j]);"
WAIT = "  wait_for_cluster();"
MISTAKES = {
    "the mean of the first row": (PRODUCER, "mean_of_row(row + r)", "mean_of_row(row)"),
    "the deviation of the first row": (PRODUCER, "__ldg(rstd + row + r)", "__ldg(rstd + row)"),
    "no bias": (PRODUCER, ONE_VALUE, ONE_VALUE.replace("norm_bias[j]", "kNoBias")),
    "parameters of the first columns": (PRODUCER,
        "load_vector(input.norm_scale + col)", "load_vector(input.norm_scale)"),
    "any: not rounded": (PRODUCER, "to_float(from_float<T>(", "(("),
    "statistics after the cast": ("norm.cu",
        ".mean = arguments.mean, .rstd = arguments.rstd}", ".mean = nullptr, .rstd = nullptr}"),
    "cluster: statistics of another row": (CLUSTER,
        "known.statistics[warp * kWarpRows + r]", "known.statistics[warp * kWarpRows]"),
    "cluster: statistics of the other band": (CLUSTER, "place, band << log2_blocks,", "place, 0,"),
    "cluster: no wait for the other band": (CLUSTER, WAIT, "  __syncthreads();"),
    "cluster: maxima of one band": (CLUSTER, "fmaxf(amax, shared.other_maxima[column])", "amax"),
    "cluster: maxima for another block": (CLUSTER, "<< log2_blocks | place.block", "<< log2_blocks"),
    "cluster: a scale of another block's tile": (CLUSTER, "tile * kTile < place.cols ?", "true ?"),
    "cluster: a scale of another block's column": (CLUSTER, "band == 0 && column < place.cols", "band == 0"),
    "cluster: columns of another block": (CLUSTER, "rows, place.first_col + place.cols,", "rows, task.cols,"),
    "cluster: scales of another tile": (CLUSTER, "row_multipliers[tile_of(v)]", "row_multipliers[tile_of(0)]"),
    "cluster: one row of two": (CLUSTER, "lane % kPerWord == 0 ? elements[0]", "true ? elements[0]"),
    "cluster: a lane left out": (CLUSTER, "int distance = 2; distance", "int distance = 1; distance"),
    "cluster: no barrier before the maxima": ("device/reduce.cuh",
        "warp_amax[threadIdx.x / kWarp] = bits;\n  __syncthreads();", "warp_amax[threadIdx.x / kWarp] = bits;"),
    "cluster: no barrier before the casts": (CLUSTER, "  __syncthreads();\n  store_columns(", "  store_columns("),
    "cluster: no barrier before the transpose": (CLUSTER, "  }\n  __syncthreads();\n#pragma", "  }\n#pragma"),
    "cluster: no barrier of the warp": (CLUSTER, "  __syncwarp();\n", ""),
    "cluster: less shared memory": ("norm.cu", "norm_by_tile::kStagedBytes<T>", "norm_by_tile::kStagedBytes<T> / 2"),
}  # fmt: skip


# Of two clusters one has a band without rows; their blocks have three tiles, where others have four.
@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    shape = (33, 165) if mistake.startswith("any") else (144, 768) if mistake.startswith("cluster") else (144, 1040)
    x = array(1, *shape, dtype=ml_dtypes.bfloat16, mean=0.5)
    with pytest.raises((AssertionError, EmulationError)):
        check(x, "layernorm", changes=(MISTAKES[mistake], *ONLY_BFLOAT16))
