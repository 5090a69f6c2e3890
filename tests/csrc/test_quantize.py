"""csrc/quantize.cu on the CPU, bit for bit against NumPy."""

import ml_dtypes
import numpy as np
import pytest
import reference
from emulation import ONLY_BFLOAT16, EmulationError, Input, Result, compile_for_cpu, planted
from entries import QUANTIZE
from reference import assert_same_bits

SOURCES = [np.float32, ml_dtypes.bfloat16, np.float16]  # in the order of SourceType
FORMATS = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]  # in the order of Fp8Type
SCALAR = Result((), np.float32)

# Whole tiles and chunks, tails of them, shapes without vectors, and nothing.
SHAPES = [
    (128, 64),
    (144, 80),
    (16, 16),
    (272, 48),
    (33, 65),
    (1, 100),
    (100, 1),
    (48, 31),
    (64, 520),
    (0, 16),
    (16, 0),
]
# Rules of a scale that comes from an amax: margin, amax_epsilon, power_2_scale.
RULES = [(0, 0.0, False), (2, 0.0, False), (-3, 1e-3, True), (0, 0.7, True)]


def run(entry, x, source, dtype, row=0, from_amax=False, rule=RULES[0], changes=(), offset=0):
    """Values, with quantize_transpose also their transpose, amax and the scale that was used."""
    rows, cols = x.shape
    margin, amax_epsilon, power_2_scale = rule
    results = [Result((rows, cols), dtype, offset)]
    results += [Result((cols, rows), dtype, offset)] if entry == "quantize_transpose" else []
    return compile_for_cpu("quantize.cu", QUANTIZE, changes).call(
        entry,
        *(Input(x, offset * x.dtype.itemsize), SOURCES.index(x.dtype), np.asarray(source, np.float32)),
        *(row, from_amax, margin, amax_epsilon, power_2_scale, FORMATS.index(dtype), rows, cols),
        *(*results, SCALAR, SCALAR),
    )


def check(entry, x, scale, dtype, got):
    values, amax = reference.quantize(x, dtype, scale)
    expected = [values, *([values.T] if entry == "quantize_transpose" else []), amax, np.float32(scale)]
    for array, wanted in zip(got, expected, strict=True):
        assert_same_bits(array, wanted)


def random(shape, dtype):
    """Sizes from far below to far above an FP8 format's; some special values; the largest last."""
    rng = np.random.default_rng(shape[0] + shape[1])
    x = (rng.normal(size=shape) * 2.0 ** rng.integers(-14, 10, size=shape)).astype(dtype)
    special = np.array([np.nan, -np.nan, 0, -0.0, 448, -464, 465, 57344, -61440], np.float32).astype(dtype)
    x.reshape(-1)[: special.size] = special[: x.size]
    x.reshape(-1)[-1:] = -6e4
    return x


@pytest.mark.parametrize("entry", ["quantize", "quantize_transpose"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_shapes(entry, source, dtype):
    for shape in SHAPES:
        x = random(shape, source)
        for scale in (1.0, 7.3e-3):
            check(entry, x, scale, dtype, run(entry, x, scale, dtype))


@pytest.mark.parametrize("entry", ["quantize", "quantize_transpose"])
@pytest.mark.parametrize("offset", [1, 8])
def test_arrays_that_are_not_aligned(entry, offset):
    x = random((64, 256), ml_dtypes.bfloat16)
    check(entry, x, 0.1, FORMATS[0], run(entry, x, 0.1, FORMATS[0], offset=offset))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("source", SOURCES[1:])
def test_every_16_bit_pattern(dtype, source):
    x = np.arange(2**16, dtype=np.uint16).view(source).reshape(256, 256)
    for scale in (1.0, 2.0**-126, 3.0e38, 1 / 3):
        check("quantize_transpose", x, scale, dtype, run("quantize_transpose", x, scale, dtype))


@pytest.mark.parametrize("dtype", FORMATS)
def test_random_bit_patterns_of_float32(dtype):
    x = np.random.default_rng(0).integers(0, 2**32, (128, 512), dtype=np.uint32).view(np.float32)
    for scale in (1.0, 1.1754945e-37, 123456.7):
        check("quantize", x, scale, dtype, run("quantize", x, scale, dtype))


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_scale_of_a_row(dtype):
    x, scales = random((32, 16), np.float16), np.array([3.0, 0.1, 1e-3], np.float32)
    for row, scale in enumerate(scales):
        check("quantize_transpose", x, scale, dtype, run("quantize_transpose", x, scales, dtype, row=row))


@pytest.mark.parametrize("entry", ["quantize", "quantize_transpose"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_the_scale_that_an_amax_gives(entry, dtype):
    x = random((16, 48), ml_dtypes.bfloat16)
    for margin, amax_epsilon, power_2_scale in RULES:
        for amax in (0.0, 1e-20, 0.3, 448.0, 1.0, np.inf, np.nan):
            got = run(entry, x, amax, dtype, from_amax=True, rule=(margin, amax_epsilon, power_2_scale))
            if margin == 0 and not np.isnan(amax):
                scale = reference.current_scale(amax, dtype, amax_epsilon, power_2_scale)
            else:
                scale = reference.scale_from_amax(max(amax, np.float32(amax_epsilon)), dtype, margin)
                scale = np.float32(2.0 ** np.ceil(np.log2(scale))) if power_2_scale else scale
            check(entry, x, scale, dtype, got)


@pytest.mark.parametrize("source", SOURCES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [*SHAPES, (1300, 80)], ids=str)
def test_sums(shape, source):
    """The sums of small integers are exact in any order, and depend on every one."""
    rows, cols = shape
    x = np.random.default_rng(rows).integers(-9, 10, shape).astype(source)
    sums, partial = Result((cols,), np.float32), Result((-(-rows // 128), cols), np.float32)
    results = [Result((rows, cols), FORMATS[0]), Result((cols, rows), FORMATS[0]), SCALAR, SCALAR, sums, partial]
    kernels = compile_for_cpu("quantize.cu", QUANTIZE)
    scale = np.float32([0.3])
    got = kernels.call("quantize_transpose_sums", x, SOURCES.index(source), scale, 0, rows, cols, *results)
    check("quantize_transpose", x, scale[0], FORMATS[0], got[:4])
    assert_same_bits(got[4], x.astype(np.float32).sum(axis=0))


# Parts of whole tiles, parts that end within one, one that no vector fits, and only two.
WIDTHS = [(64, 64, 64), (128, 16, 48), (16, 16, 96), (80, 20, 28), (64, 48, 0)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_matrices_side_by_side(widths, source, changes=()):
    rows, cols = 144, sum(widths)
    x = np.random.default_rng(rows).integers(-9, 10, (rows, cols)).astype(source)
    parts = [np.ascontiguousarray(part) for part in np.split(x, np.cumsum(widths)[:-1], axis=1)]
    sums, partial = Result((cols,), np.float32), Result((-(-rows // 128), cols), np.float32)
    results = [Result((rows, cols), FORMATS[0]), Result((cols, rows), FORMATS[0]), SCALAR, SCALAR, sums, partial]
    scale = np.float32([0.3])
    ends = np.cumsum(widths).tolist()
    kernels = compile_for_cpu("quantize.cu", QUANTIZE, changes)
    got = kernels.call("side_by_side", *parts, SOURCES.index(source), scale, 0, rows, *ends, *results)
    check("quantize_transpose", x, scale[0], FORMATS[0], got[:4])
    assert_same_bits(got[4], x.astype(np.float32).sum(axis=0))


def test_a_wrong_matrix_is_noticed():
    change = ("quantize.cu", "if (col >= matrices.ends[i - 1])", "if (col > matrices.ends[i - 1])")
    with pytest.raises((AssertionError, EmulationError), match=r"elements differ|argument"):
        test_matrices_side_by_side(WIDTHS[0], SOURCES[1], (change, *ONLY_BFLOAT16))


# What is wrong then, and the mistake that the harness names; None where only the numbers are wrong.
CAST, TILE, FP8 = "device/quantize_tile.cuh", "device/tile.cuh", "device/fp8.cuh"
APPROXIMATE = 'float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(scale)); return y;'
MISTAKES = {
    "no barrier": ((CAST, "  __syncthreads();\n\n#pragma", "#pragma"), "order of threads"),
    "the swizzle is written only": ((TILE, " ^ (group >> kWithin)]", "]"), "order of threads"),
    "bytes of a patch in another order": ((FP8, "low23, 0x7632", "low23, 0x6732"), None),
    "one row too many": ((CAST, "if (row < rows && col", "if (row <= rows && col"), "argument 0: byte"),
    "one column too many": ((TILE, "column < wanted", "column <= wanted"), "argument"),
    "half of the transpose": ((TILE, "pass < kCols / kAtOnce", "pass < kCols / kAtOnce / 2"), "order of threads"),
    "a tile too small": ((CAST, "ValuesTile::kChunks];", "ValuesTile::kChunks - 1];"), "shared|index"),
    "never aligned": ((CAST, "results.rows % 16 == 0 && results.width % 16 == 0", "true"), "not aligned|argument"),
    "an approximate reciprocal": ((FP8, "return __frcp_rn(scale);", APPROXIMATE), None),
    "the halves exchanged": ((FP8, '"f"(second), "f"(first)', '"f"(first), "f"(second)'), None),
}  # fmt: skip


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    change, sentence = MISTAKES[mistake]
    shape = (136, 80) if mistake == "never aligned" else (144, 80)
    x = random(shape, ml_dtypes.bfloat16)
    with pytest.raises(EmulationError if sentence else AssertionError, match=sentence or "elements differ"):
        for scale in (0.1, 0.3, 0.7, 1.1):
            check(
                "quantize_transpose",
                x,
                scale,
                FORMATS[0],
                run("quantize_transpose", x, scale, FORMATS[0], changes=(change, *ONLY_BFLOAT16)),
            )
