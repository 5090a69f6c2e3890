"""csrc/take_rows.cu on the CPU, byte for byte against NumPy."""

import numpy as np
import pytest
from emulation import EmulationError, Result, compile_for_cpu, planted
from reference import assert_same_bits

ENTRY = """
extern "C" int take_rows(const uint8_t* x, const int32_t* sources, uint8_t* taken, uint8_t* transpose, int64_t of_x,
                         int64_t rows, int64_t cols, int64_t transposes) {
  return jax_fp8::launch_take_rows({x, sources, taken, transposes != 0 ? transpose : nullptr, of_x, rows, cols},
                                   nullptr);
}
"""

# Rows of x, rows and columns of the result: less than a tile, whole tiles, and more than one each way.
SHAPES = [(3, 16, 16), (200, 128, 128), (40, 144, 272), (300, 272, 144), (1, 1040, 16), (50, 16, 1040)]
ANY_ROWS = [(5, 1, 16), (7, 130, 144), (9, 257, 32), (2, 3, 272)]
EMPTY = [(4, 0, 16), (4, 16, 0), (0, 32, 16)]


def taken(x, sources, transposes=True, changes=()):
    rows, cols = len(sources), x.shape[1]
    results = Result((rows, cols), np.uint8), Result((cols, rows) if transposes else (0,), np.uint8)
    kernels = compile_for_cpu("take_rows.cu", ENTRY, changes)
    return kernels.call("take_rows", x, sources, *results, len(x), rows, cols, transposes)


def problem(of_x, rows, cols):
    """Every byte there is; rows that are there, and rows that are not."""
    random = np.random.default_rng([of_x, rows, cols])
    sources = random.integers(0, max(of_x, 1), rows).astype(np.int32)
    nowhere = random.random(rows) < 0.2
    sources[nowhere] = random.choice(np.int32([-1, of_x, -(2**31), 2**31 - 1]), nowhere.sum())
    return random.integers(0, 256, (of_x, cols), dtype=np.uint8), sources


def expected(x, sources):
    is_there = (sources >= 0) & (sources < len(x))
    rows = np.zeros((len(sources), x.shape[1]), np.uint8)
    rows[is_there] = x[sources[is_there]]
    return rows


@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY], ids=str)
def test_rows_and_their_transpose(shape):
    x, sources = problem(*shape)
    rows, transpose = taken(x, sources)
    assert_same_bits(rows, expected(x, sources))
    assert_same_bits(transpose, expected(x, sources).T)


@pytest.mark.parametrize("shape", [*SHAPES, *ANY_ROWS, *EMPTY], ids=str)
def test_rows_alone(shape):
    x, sources = problem(*shape)
    assert_same_bits(taken(x, sources, transposes=False)[0], expected(x, sources))


KERNEL = "take_rows.cu"
MISTAKES = {
    "rows that are not there": (KERNEL, "source < 0 || ", ""),
    "a row behind the last": (KERNEL, "source >= arguments.of_x", "source > arguments.of_x"),
    "one row too many": (KERNEL, "if (patch.row + r < arguments.rows) *", "*"),
    "one column too many": (KERNEL, "&& patch.col < arguments.cols;", "&& patch.col <= arguments.cols;"),
    "rows in order": (KERNEL, "source * arguments.cols", "row % arguments.of_x * arguments.cols"),
    "no barrier": (KERNEL, "    __syncthreads();\n", ""),
    "one byte of another column": ("device/byte_tile.cuh", "rows[3].y}, columns", "rows[3].z}, columns"),
    "one tile too few": (KERNEL, "<<<tiles,", "<<<tiles - 1,"),
}


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    with pytest.raises((EmulationError, AssertionError)):
        for shape, transposes in (((40, 144, 272), True), ((7, 257, 144), False)):
            x, sources = problem(*shape)
            rows, transpose = taken(x, sources, transposes, (MISTAKES[mistake],))
            assert_same_bits(rows, expected(x, sources))
            if transposes:
                assert_same_bits(transpose, expected(x, sources).T)
