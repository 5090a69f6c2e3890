"""csrc/transpose.cu on the CPU, byte for byte against NumPy."""

import numpy as np
import pytest
from emulation import EmulationError, Input, Result, compile_for_cpu, planted
from reference import assert_same_bits

ENTRY = """
extern "C" int transpose(const uint8_t* x, uint8_t* transpose, int64_t rows, int64_t cols) {
  return jax_fp8::launch_transpose({x, transpose, rows, cols}, nullptr);
}
"""

# Whole tiles, vectors that end within a tile in either dim or both, and more than one tile each way.
WITH_VECTORS = [(128, 128), (16, 16), (128, 144), (144, 128), (272, 400), (16, 1040), (1040, 16)]
# A dim that no vector fits, of less than a tile and of more; and nothing.
WITHOUT = [(1, 1), (1, 300), (300, 1), (33, 65), (128, 120), (120, 128), (257, 130), (130, 257), (16, 24), (8, 272)]
EMPTY = [(0, 0), (0, 16), (16, 0), (0, 7), (7, 0)]


def transposed(x, changes=(), offset=0, result_offset=0):
    rows, cols = x.shape
    kernels = compile_for_cpu("transpose.cu", ENTRY, changes)
    (result,) = kernels.call("transpose", Input(x, offset), Result((cols, rows), np.uint8, result_offset), rows, cols)
    return result


def random(shape):
    """Every byte there is, so every pattern of either format, NaN too."""
    return np.random.default_rng(shape).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("shape", [*WITH_VECTORS, *WITHOUT, *EMPTY], ids=str)
def test_shapes(shape):
    x = random(shape)
    assert_same_bits(transposed(x), x.T)


@pytest.mark.parametrize("offsets", [(1, 0), (0, 1), (8, 8), (4, 0), (0, 15)], ids=str)
def test_arrays_that_are_not_aligned(offsets):
    x = random((144, 160))
    assert_same_bits(transposed(x, (), *offsets), x.T)


# What is wrong then, and the mistake that the harness names; None where only the bytes are wrong.
KERNEL, PATCH = "transpose.cu", "device/byte_tile.cuh"
TILE, FP8 = "device/tile.cuh", "device/fp8.cuh"
VECTORIZED = "arguments.rows % kBytesAtOnce == 0 && arguments.cols % kBytesAtOnce == 0"
MISTAKES = {
    "no barrier": ((KERNEL, "  __syncthreads();\n  ByteTile", "  ByteTile"), "order of threads"),
    "the swizzle is written only": ((TILE, " ^ (group >> kWithin)]", "]"), "order of threads"),
    "bytes of a patch in another order": ((FP8, "low23, 0x7632", "low23, 0x6732"), None),
    "one byte of another column": ((PATCH, "rows[3].y}, columns", "rows[3].z}, columns"), None),
    "one row too many": ((KERNEL, "patch.row < rows &&", "patch.row <= rows &&"), "argument 0: byte"),
    "one column too many": ((KERNEL, "&& patch.col < cols)", "&& patch.col <= cols)"), "argument 0: byte"),
    "one row of the result too many": ((TILE, "column < wanted", "column <= wanted"), "argument 1"),
    "a row of the result too long": ((TILE, "out_col >= rows", "out_col > rows"), None),
    "half of the result": ((TILE, "pass < kCols / kAtOnce", "pass < kCols / kAtOnce / 2"), "order of threads"),
    "a tile too small": ((KERNEL, "[ByteTile::kChunks];", "[ByteTile::kChunks - 1];"), "shared|index"),
    "one tile too few": ((KERNEL, "<<<tiles,", "<<<tiles - 1,"), "order of threads"),
    "tiles counted down the columns": ((KERNEL, "divide_up(arguments.cols, B", "divide_up(arguments.rows, B"), None),
}  # fmt: skip
ANY = {
    "always vectors": ((KERNEL, VECTORIZED, "true"), "not aligned|argument"),
    "never aligned": ((KERNEL, "are_aligned({arguments.x, arguments.transpose}) &&", ""), "not aligned"),
    "no barrier": ((KERNEL, "  __syncthreads();\n  for", "  for"), "order of threads"),
    "one row too many": ((KERNEL, "tile_row + r < rows", "tile_row + r <= rows"), "argument 0: byte"),
    "a row too long": ((KERNEL, "tile_row + inner < rows", "tile_row + inner <= rows"), None),
    "one row of the result too many": ((KERNEL, "tile_col + c < cols", "tile_col + c <= cols"), "argument 1"),
    "every second row": ((KERNEL, "r += kAtOnce", "r += 2 * kAtOnce"), "order of threads"),
}


def check_mistake(mistake, x, offset=0):
    change, sentence = mistake
    with pytest.raises(EmulationError if sentence else (AssertionError, EmulationError), match=sentence):
        assert_same_bits(transposed(x, (change,), offset), x.T)


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    check_mistake(MISTAKES[mistake], random((144, 272)))


@pytest.mark.parametrize("mistake", planted(ANY))
def test_a_mistake_byte_by_byte_is_noticed(mistake):
    shape, offset = ((144, 272), 8) if mistake == "never aligned" else ((136, 135), 0)
    check_mistake(ANY[mistake], random(shape), offset)
