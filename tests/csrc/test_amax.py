"""csrc/amax.cu on the CPU, bit for bit against NumPy."""

import ml_dtypes
import numpy as np
import pytest
import reference
from emulation import EmulationError, Input, Result, compile_for_cpu, planted
from reference import assert_same_bits

ENTRY = """
extern "C" int amax(const void* x, int64_t x_type, int64_t count, float* amax) {
  return jax_fp8::launch_amax({x, static_cast<jax_fp8::SourceType>(x_type), count, amax, false}, nullptr);
}

extern "C" int amax_of_two(const void* x, const void* y, int64_t type, int64_t x_count, int64_t y_count, float* amax) {
  const auto source = static_cast<jax_fp8::SourceType>(type);
  const int status = jax_fp8::launch_amax({x, source, x_count, amax, false}, nullptr);
  return status ? status : jax_fp8::launch_amax({y, source, y_count, amax, true}, nullptr);
}
"""
SOURCES = [np.float32, ml_dtypes.bfloat16, np.float16]  # in the order of SourceType


def amax(x, changes=(), offset=0):
    kernels = compile_for_cpu("amax.cu", ENTRY, changes)
    (result,) = kernels.call("amax", Input(x, offset), SOURCES.index(x.dtype), x.size, Result((), np.float32))
    return result


def random(count, dtype):
    """The largest is the last: whoever forgets the tail is wrong."""
    x = np.random.default_rng(count).normal(size=count).astype(dtype)
    x[-1:] = -123
    return x


@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize("count", [0, 1, 31, 8191, 8192, 3 * 16384, 3 * 16384 + 5])
def test_whole_chunks_and_tails(dtype, count):
    x = random(count, dtype)
    assert_same_bits(amax(x), reference.amax(x))


@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize("position", [0, 8191, 32768])
def test_infinity_counts_and_so_does_nan(dtype, position):
    x = np.zeros(2 * 16384 + 1, dtype)
    x[position // 2] = 0.5
    assert_same_bits(amax(x), np.float32(0.5))
    x[position] = -np.inf
    assert_same_bits(amax(x), np.float32(np.inf))
    for nan in (np.nan, -np.nan):
        x[position // 3 + 1] = nan
        assert np.isnan(amax(x))


@pytest.mark.parametrize("dtype", SOURCES)
def test_an_array_that_is_not_aligned(dtype):
    x = random(2 * 16384, dtype)
    assert_same_bits(amax(x, offset=np.dtype(dtype).itemsize), reference.amax(x))


@pytest.mark.parametrize("counts", [(20000, 33), (33, 20000), (0, 5), (5, 0)], ids=str)
def test_of_two_arrays_it_is_the_largest(counts):
    for scales in ((1, 3), (3, 1)):
        x, y = (random(count, np.float32) * scale for count, scale in zip(counts, scales, strict=True))
        kernels = compile_for_cpu("amax.cu", ENTRY)
        (result,) = kernels.call("amax_of_two", x, y, SOURCES.index(x.dtype), *counts, Result((), np.float32))
        assert_same_bits(result, reference.amax(np.concatenate([x, y])))


# What is wrong then, and what notices it.
MISTAKES = {
    "no barrier": (("device/reduce.cuh", "__syncthreads();", ""), "order of threads"),
    "a barrier for some": (
        ("device/reduce.cuh", "__syncthreads();", "if (threadIdx.x >= kWarp) __syncthreads();"),
        "order of threads",
    ),
    "a mask of some": (("device/reduce.cuh", "0xFFFFFFFFu, __float", "0xFFFFu, __float"), "not in its own mask"),
    "one lane less": (
        ("device/reduce.cuh", "if (threadIdx.x >= kWarp)", "if (threadIdx.x >= kWarp - 1)"),
        "deadlock.*have ended",
    ),
    "beyond the end": (("amax.cu", "i < end;", "i <= end;"), "argument 0: byte 196640"),
    "not cleared": (
        ("amax.cu", "cudaMemsetAsync(arguments.amax, 0,", "cudaMemsetAsync(arguments.amax, 0, 0 *"),
        "order of threads",
    ),
    "not aligned": (("amax.cu", "aligned &&", "true &&"), "vector.cuh:.*not aligned"),
    "no block": (("amax.cu", "<<<blocks", "<<<0"), "got CUDA error 9"),
    "too many threads": (("amax.cu", "<<<blocks, kThreads", "<<<blocks, 5 * kThreads"), "got CUDA error 9"),
}


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    change, sentence = MISTAKES[mistake]
    x = random(3 * 16384 + 8, np.float32)
    with pytest.raises(EmulationError, match=sentence):
        amax(x, (change,), offset=4 if mistake == "not aligned" else 0)
