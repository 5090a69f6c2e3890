"""Activations and their gradients cast by tiles: csrc/activation.cu on the CPU, bit for bit.

What is cast is asked of the same producer, element by element; tests/csrc/test_activation.py has the functions.
"""

import ml_dtypes
import numpy as np
import plain
import pytest
from by_tile import E4M3, TileRule, scales_shape
from combinations import every_pair, name_of
from emulation import ONLY_BFLOAT16, ORDERS, EmulationError, Input, Result, compile_for_cpu, planted
from entries import ACTIVATION
from reference import assert_same_bits

ALL = [*plain.ACTIVATIONS, *plain.GATES]
NAMES = list(plain.ACTIVATIONS)  # in the order of Activation
SOURCES = [np.float32, ml_dtypes.bfloat16, np.float16]  # in the order of SourceType
ADDITIONS = 2.0**-20  # of a sum of a few hundred float32, as a share of the sum of their magnitudes
BY_LINE, OF_GRADIENTS = TileRule(), TileRule(square_t=False, power_2_scale=True)

# Rows and columns of y: whole tiles, tails of them, of two parts a tile with columns of both, no vectors, nothing; and
# more tiles than blocks, of which there are 8 here.
SHAPES = [(400, 384), (272, 400), (144, 128), (128, 272), (144, 80), (33, 65), (1, 100), (131, 1), (0, 16), (16, 0)]


def inputs(activation, shape, dtype, backward):
    """dy or None, and x; no two rows or columns of one size."""
    rng = np.random.default_rng(sum(shape))
    (rows, width), halves = shape, 2 if activation in plain.GATES else 1
    sizes = np.exp2(rng.integers(-4, 5, size=(rows, 1)) + rng.integers(-2, 3, size=(1, width)))
    dy = (rng.normal(size=shape) * sizes).astype(dtype) if backward else None
    return dy, (rng.normal(size=(rows, width * halves)) * np.tile(np.sqrt(sizes), halves)).astype(dtype)


def problem_of(activation, dy, x, row_weights, offset=0):
    gated = activation in plain.GATES
    arrays = [None if dy is None else Input(dy, offset * x.itemsize), Input(x, offset * x.itemsize), row_weights]
    function = NAMES.index(plain.GATES.get(activation, activation))
    return *arrays, SOURCES.index(x.dtype), function, gated, x.shape[0], x.shape[1] // (1 + gated)


def elements(activation, dy, x, row_weights):
    """y, or dx and y, as they are cast."""
    rows, width = x.shape[0], x.shape[1] // (1 + (activation in plain.GATES))
    parts = 1 if dy is None else x.shape[1] // max(1, width)
    made = np.zeros((rows, parts + (dy is not None), width), np.float32)
    if made.size:
        kernels = compile_for_cpu("activation.cu", ACTIVATION)
        problem = problem_of(activation, dy, x, row_weights)
        (made,) = kernels.call("elements", *problem, Result(made.shape, np.float32), orders=["forward"])
    return made[:, :parts].reshape(rows, parts * width), made[:, -1]


def run(activation, dy, x, row_weights, rule=BY_LINE, changes=(), offset=0, orders=ORDERS):
    """The cast, and beside a gradient its sums, the activated tensor and the scales of that."""
    problem = problem_of(activation, dy, x, row_weights, offset)
    rows, width, cols = problem[-2], problem[-1], problem[-1] if dy is None else x.shape[1]
    beside = [None] * 4
    if dy is not None:
        sums = [Result((cols,), np.float32), Result((-(-rows // 128), cols), np.float32)]
        activated = [Result((width, rows), E4M3, offset), Result(scales_shape((width, rows), False), np.float32)]
        beside = [*sums, *activated]
    got = iter(
        compile_for_cpu("activation.cu", ACTIVATION, changes).call(
            "by_tile",
            *(*problem, *rule.attributes(), *rule.results(rows, cols, offset), *beside),
            orders=tuple(orders),
        )
    )
    cast = rule.filled(got)
    return cast, [array for array in got if dy is not None]


def check(activation, dy, x, rule=BY_LINE, row_weights=None, **how):
    cast, beside = run(activation, dy, x, row_weights, rule, **how)
    made, y = elements(activation, dy, x, row_weights)
    rule.check(made, cast)
    if dy is None:
        return
    sums, _, activated_t, activated_scales_t = beside
    for array, wanted in zip((activated_t, activated_scales_t), rule.cast(y.T, False), strict=True):
        assert_same_bits(array, wanted)
    with np.errstate(invalid="ignore"):
        exact, magnitudes = (array.astype(np.float64).sum(axis=0) for array in (made, np.abs(made)))
    finite = np.isfinite(magnitudes)
    assert_same_bits(np.isfinite(sums), finite)
    assert np.all(np.abs(sums[finite] - exact[finite]) <= ADDITIONS * magnitudes[finite])


@pytest.mark.parametrize(("activation", "backward", "dtype"), every_pair(ALL, [False, True], SOURCES), ids=name_of)
def test_every_activation(activation, backward, dtype):
    for shape in [(48, 128), (5, 70)]:
        check(activation, *inputs(activation, shape, dtype, backward), orders=["random"])


@pytest.mark.parametrize(
    ("shape", "activation", "backward"), every_pair(SHAPES, ["squared_relu", "reglu"], [False, True]), ids=name_of
)
def test_shapes(shape, activation, backward):
    for rule, offset in ((BY_LINE, 0), (OF_GRADIENTS, 1)):  # with and without vectors
        check(activation, *inputs(activation, shape, ml_dtypes.bfloat16, backward), rule, offset=offset)


@pytest.mark.parametrize("shape", [(272, 384), (33, 65)], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("activation", ["squared_relu", "reglu"])
def test_weights_of_rows(activation, backward, shape):
    """Of `squared_relu` backward a block also makes tiles past the last row, which have no weight."""
    dy, x = inputs(activation, shape, ml_dtypes.bfloat16, backward)
    weights = np.exp2(np.arange(shape[0]) % 7).astype(np.float32)
    check(activation, dy, x, row_weights=weights)
    made, y = elements(activation, dy, x, weights)
    plain_made, plain_y = elements(activation, dy, x, None)
    assert_same_bits(made, plain_made * weights[:, None])
    assert_same_bits(y, plain_y * weights[:, None])


@pytest.mark.parametrize("shape", [(144, 128), (33, 65)], ids=str)
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_one_orientation(activation, shape):
    _, x = inputs(activation, shape, ml_dtypes.bfloat16, False)
    check(activation, None, x, TileRule(columnwise=False))
    check(activation, None, x, TileRule(rowwise=False))


SMALL_SHARED_MEMORY = ("device/quantize_by_tile.cuh", "most_shared >= kWanted", "most_shared < kWanted")


@pytest.mark.parametrize("activation", ["squared_relu", "reglu"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_gpu_whose_shared_memory_is_too_small_to_fetch_ahead(activation, backward):
    dy, x = inputs(activation, (144, 384), ml_dtypes.bfloat16, backward)
    check(activation, dy, x, changes=(SMALL_SHARED_MEMORY, *ONLY_BFLOAT16))


def test_a_nan_in_one_part_says_nothing_to_the_scales():
    dy, x = inputs("reglu", (32, 128), ml_dtypes.bfloat16, True)
    x[3, 130], x[4, 5], dy[5, 6] = np.nan, np.inf, -np.inf
    check("reglu", dy, x)


FAST, ANY, SCALES = "device/quantize_by_tile.cuh", "device/quantize_any_by_tile.cuh", "device/tile_scales.cuh"
PATCHES = "device/tile_patches.cuh"
MISTAKES = {
    "rows of the other part": (FAST, "shared.row_multipliers[part]", "shared.row_multipliers[0]"),
    "a gradient at another place": (FAST, "(place.row() * kParts + part) * width", "place.row() * kParts * width"),
    "a transpose at another place": (FAST, "cast.values_t + part * width * rows", "cast.values_t"),
    "a companion cast with its part": (FAST, "shared.column_multipliers[kMade - 1]", "shared.column_multipliers[0]"),
    "parts that share a tile": (FAST, "(Producer::kParts == 1 || width % kTile == 0)", "true"),
    "scales of the first part": (SCALES, "part * task.results.width + tile_col;", "tile_col;"),
    "sums of one warp left out": (SCALES,
        "warp = 0; warp < kWarps; ++warp) {\n    sum", "warp = 1; warp < kWarps; ++warp) {\n    sum"),
    "a companion's maxima of the first part": (FAST,
        "put_column_maxima(made[0], kParts", "put_column_maxima(made[0], 0"),
    "a companion of the other patch": (FAST, "made[1][r][kParts]", "made[0][r][kParts]"),
    "a companion in the slots of another": (PATCHES, "r * kHalves + half", "r * kHalves"),
    "inputs of another row": (PATCHES, "at<T>(r * kHalves + i)", "at<T>(i)"),
    "any: the other part": (ANY, "kParts == 2 && part == 1", "kParts == 2 && part == 0"),
    "any: a companion for each part": (ANY,
        "kCompanions && col < results.width", "kCompanions && col >= results.width"),
    "any: sums of every second row": (ANY, "sums[0][c] + sums[1][c]", "sums[0][c]"),
}  # fmt: skip


# In tiles that are fetched ahead.
AHEAD = {
    "the tile before": (FAST, "place = next;", ""),
    "the same tile again": (FAST, "fetch_patch(producer, task, next, half", "fetch_patch(producer, task, place, half"),
    "no wait for what is fetched": (FAST, "wait_for_fetched();\n  } else", "} else"),
    "the next tile too early": (FAST,
        "if constexpr (kAhead) take_patch",
        "if constexpr (kAhead) fetch_patch(producer, task, next, half, slots);\n    if constexpr (kAhead) take_patch"),
    "the other half's inputs": (FAST, "take_patch(slots, half", "take_patch(slots, 0"),
    "what is outside stays": (PATCHES, "write_vector(slots.at<T>(first + i), filled_with<T>(0))", ""),
    "tiles left out": (FAST, "tile += gridDim.x", "tile += 2 * gridDim.x"),
    "a weight past the last row": ("activation.cu", "row_weights && row < rows", "row_weights"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", planted(AHEAD))
def test_a_mistake_ahead_is_noticed(mistake):
    dy, x = inputs("squared_relu", (272, 400), ml_dtypes.bfloat16, True)
    weights = np.exp2(np.arange(272) % 7).astype(np.float32)
    with pytest.raises((AssertionError, EmulationError)):
        check("squared_relu", dy, x, changes=(AHEAD[mistake], *ONLY_BFLOAT16), row_weights=weights)


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    change = MISTAKES[mistake]
    shape = (48, 70) if change[0] == ANY else (144, 144) if mistake == "parts that share a tile" else (144, 128)
    dy, x = inputs("reglu", shape, ml_dtypes.bfloat16, True)
    with pytest.raises((AssertionError, EmulationError)):
        check("reglu", dy, x, changes=(change, *ONLY_BFLOAT16))
