"""csrc/device/quantize_by_tile.cuh on the CPU, by what csrc/quantize.cu makes of it: bit for bit against NumPy."""

import ml_dtypes
import numpy as np
import pytest
from by_tile import TileRule
from emulation import ONLY_BFLOAT16, ORDERS, EmulationError, Input, Result, compile_for_cpu, planted
from entries import QUANTIZE
from reference import assert_same_bits

SOURCES = [np.float32, ml_dtypes.bfloat16, np.float16]  # in the order of SourceType
BY_LINE = TileRule()
SQUARES = [(False, False), (False, True), (True, True)]

# Whole tiles, tails of them in either dim, halves that are empty, shapes without vectors, and nothing.
SHAPES = [
    (128, 128),
    (144, 208),
    (272, 48),
    (16, 16),
    (130, 260),
    (33, 65),
    (1, 100),
    (131, 1),
    (0, 16),
    (16, 0),
    (0, 0),
]


def run(parts, rule=BY_LINE, sums=False, changes=(), offset=0, orders=ORDERS):
    """What the kernel makes of matrices side by side; with sums these at the end."""
    rows, ends = parts[0].shape[0], np.cumsum([part.shape[1] for part in parts]).tolist()
    cols, source = ends[-1], parts[0].dtype
    beside = [Result((cols,), np.float32), Result((-(-rows // 128), cols), np.float32)] if sums else [None, None]
    arrays = [Input(part, offset * source.itemsize) for part in parts] + [None] * (3 - len(parts))
    ends += [cols] * (3 - len(ends))
    kernels = compile_for_cpu("quantize.cu", QUANTIZE, changes)
    got = iter(
        kernels.call(
            "by_tile",
            *(
                *arrays,
                SOURCES.index(source),
                rows,
                *ends,
                *rule.attributes(),
                *rule.results(rows, cols, offset),
                *beside,
            ),
            orders=tuple(orders),
        )
    )
    return [*rule.filled(got), *([next(got)] if sums else [])]


def check(x, rule=BY_LINE, **how):
    rule.check(x, run([x], rule, **how))


def random(shape, dtype):
    """No two tiles of one size; some zeros, and the largest last."""
    rng = np.random.default_rng(shape[0] + shape[1])
    x = rng.normal(size=shape) * np.exp2(rng.integers(-9, 8, size=shape))
    x *= np.exp2(rng.integers(-4, 5, size=(shape[0], 1))) * np.exp2(rng.integers(-4, 5, size=(1, shape[1])))
    x[rng.random(shape) < 0.1] = -0.0
    x = np.clip(x, -3e4, 3e4).astype(dtype)
    x.reshape(-1)[-1:] = -6e4
    return x


@pytest.mark.parametrize("source", SOURCES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("squares", SQUARES, ids=str)
def test_shapes(squares, source):
    for shape in SHAPES:
        check(random(shape, source), TileRule(*squares))


@pytest.mark.parametrize("shape", [(144, 208), (33, 165)], ids=str)
@pytest.mark.parametrize("square", [False, True])
def test_one_orientation(square, shape):
    x = random(shape, ml_dtypes.bfloat16)
    check(x, TileRule(square=square, columnwise=False))
    check(x, TileRule(square_t=square, rowwise=False))
    check(x, TileRule(True, True, rowwise=False))


@pytest.mark.parametrize("offset", [1, 8])
def test_arrays_that_are_not_aligned(offset):
    check(random((144, 144), ml_dtypes.bfloat16), offset=offset)


@pytest.mark.parametrize("power_2_scale", [False, True])
@pytest.mark.parametrize("source", SOURCES[1:], ids=lambda dtype: np.dtype(dtype).name)
def test_every_16_bit_pattern(source, power_2_scale):
    """Tiles of NaNs, of NaNs with an infinity, of subnormals; rows of one exponent, columns of all."""
    x = np.arange(2**16, dtype=np.uint16).view(source).reshape(256, 256)
    for matrix in (x, x.T.copy()):
        check(matrix, TileRule(power_2_scale=power_2_scale), orders=["random"])


@pytest.mark.parametrize("amax_epsilon", [0.0, 0.7])
@pytest.mark.parametrize("shape", [(32, 272), (3, 200)], ids=str)
def test_special_values(shape, amax_epsilon):
    """A NaN says nothing to a scale, a tile of nothing but NaNs or zeros included; an infinity makes it 1."""
    x = random(shape, ml_dtypes.bfloat16)
    x[0], x[1, :128], x[2, 3] = np.nan, 0, -np.inf
    x[:, 5], x[:, 6] = np.nan, 0
    x[1, 140], x[1, 142] = np.nan, np.inf
    for squares in SQUARES:
        check(x, TileRule(*squares, amax_epsilon=amax_epsilon))


def test_neighbours_of_where_a_power_of_two_ends():
    """448 is 1.75 * 2**8: float32 amaxes around 1.75 * 2**e, one to a column, and every margin that a rule may have."""
    ends = np.ldexp(np.float32(1.75), np.arange(-126, 128)).astype(np.float32)
    amaxes = np.concatenate([np.nextafter(ends, np.float32(0)), ends, np.nextafter(ends, np.float32(np.inf))])
    for x in (np.zeros((16, 768), np.float32), np.zeros((3, 768), np.float32)):
        x[2, : amaxes.size] = amaxes
        for rule in (TileRule(power_2_scale=True), TileRule(), TileRule(margin=3, power_2_scale=True)):
            check(x, rule, orders=["random"])
        got = run([x], TileRule(power_2_scale=True), orders=["random"])
        assert np.all(np.frexp(got[4])[0] == 0.5)
        with pytest.raises(AssertionError, match="elements differ"):
            TileRule().check(x, got)


@pytest.mark.parametrize("source", SOURCES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(144, 80), (300, 304), (33, 200), (0, 16)], ids=str)
def test_sums(shape, source):
    """The sums of small integers are exact in any order, and depend on every one."""
    x = np.random.default_rng(shape[1]).integers(-9, 10, shape).astype(source)
    *cast, sums = run([x], sums=True)
    TileRule().check(x, cast)
    assert_same_bits(sums, x.astype(np.float32).sum(axis=0))


# Parts that end with a tile, within one, where no vector fits, and only two.
@pytest.mark.parametrize("widths", [(128, 16, 128), (64, 48, 32), (80, 20, 44), (64, 96)], ids=str)
def test_matrices_side_by_side(widths, changes=()):
    x = np.random.default_rng(0).integers(-9, 10, (144, sum(widths))).astype(ml_dtypes.bfloat16)
    parts = [np.ascontiguousarray(part) for part in np.split(x, np.cumsum(widths)[:-1], axis=1)]
    rule = TileRule(square_t=True)
    *cast, sums = run(parts, rule, sums=True, changes=changes)
    rule.check(x, cast)
    assert_same_bits(sums, x.astype(np.float32).sum(axis=0))


FAST, ANY, SCALES = "device/quantize_by_tile.cuh", "device/quantize_any_by_tile.cuh", "device/tile_scales.cuh"
COMMON, MAXIMA, PATCHES = "device/by_tile.cuh", "device/magnitude.cuh", "device/tile_patches.cuh"
MISTAKES = {
    "no barrier before the scales": (("device/reduce.cuh", "warp_amax[threadIdx.x / kWarp] = bits;\n  __syncthreads();",
                                      "warp_amax[threadIdx.x / kWarp] = bits;"), "order of threads"),
    "no barrier before the casts": ((FAST, "shared);\n  __syncthreads();", "shared);"), "order of threads"),
    "no barrier before the transpose": ((FAST, "  }\n  __syncthreads();", "  }"), "order of threads"),
    "half of the columns": ((FAST,
        "shared.column_multipliers[part] + in_tile", "shared.column_multipliers[part]"), None),
    "rows of another patch": ((FAST, "[part] + Place::patch_row()", "[part] + group * kPatchRows"), None),
    "cast once": ((FAST, "cast.rule.square && cast.rule.square_t)", "cast.rule.square_t)"), None),
    "one row too many": ((PATCHES, "place.row() < task", "place.row() <= task"), "argument 0: byte"),
    "a half that is not there": ((PATCHES, "place.col(half) < task", "place.col(0) < task"), "argument|is null"),
    "less shared memory": ((FAST,
        "kThreads, kBytes, stream>>>", "kThreads, kBytes / 2, stream>>>"), "must not"),
    "never aligned": ((FAST, "rows % 16 == 0 && width % 16 == 0", "true"), "not aligned|argument"),
    "a NaN for the scales": ((SCALES, "if (amax != amax)", "if (false)"), None),
    "no NaN for the amax": ((SCALES,
        "find_row_maxima(made, part, propagate", "find_row_maxima(made, part, give_way"), None),
    "one row of two": ((SCALES, "two[1] = join_maxima<T>(maxima[2]", "two[1] = join_maxima<T>(maxima[1]"), None),
    "one patch of four": ((SCALES, "share_maxima<T>(two_patches, four_patches, kGroups)",
                           "share_maxima<T>(two_patches, four_patches, 0)"), None),
    "one warp left out": ((SCALES, "warp = 0; warp < kOfWarps; ++warp) amax = fmaxf(amax, element",
                           "warp = 1; warp < kOfWarps; ++warp) amax = fmaxf(amax, element"), None),
    "signs of the larger": ((SCALES, "return fabsf(to_float(", "return (to_float("), None),
    "scales of columns in rows": ((COMMON, ": j / kTile * i_count + i]", ": i * j_tiles + j / kTile]"), None),
    "a scale behind the edge": ((COMMON, "if (i < i_count && j < j_count)", "if (j < j_count)"), "argument|written"),
    "the first half kept": ((MAXIMA, "upper ? high : low, received", "low, received"), None),
    "any: no barrier": ((ANY, "    }\n  }\n  __syncthreads();", "    }\n  }"), "order of threads"),
    "any: every second row": ((ANY, "rows && is_inside; r += kRowsAtOnce", "rows && is_inside; r += 4"), "order of"),
    "any: a NaN for the scales": ((ANY, "fmaxf(0.0f, fabsf(x))", "fabsf(x)"), None),
}  # fmt: skip


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    change, sentence = MISTAKES[mistake]
    shape = (133, 200) if change[0] == ANY else (136, 208) if mistake == "never aligned" else (144, 208)
    x = random(shape, ml_dtypes.bfloat16)
    x[40, 50], x[40, 52] = np.nan, 2.9e4
    with pytest.raises(EmulationError if sentence else AssertionError, match=sentence or "elements differ"):
        for rule in (TileRule(), TileRule(square_t=True)):
            check(x, rule, changes=(change, *ONLY_BFLOAT16))
