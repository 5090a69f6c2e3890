"""What the stand-in for CUDA computes: conversions, approximations, intrinsics,
and what the lanes of a warp do together.
"""

import ml_dtypes
import numpy as np
import pytest
import reference
from reference import assert_same_bits

from emulation import EmulationError, InPlace, Result, compile_for_cpu

CONVERSIONS = """
__global__ void from_float(const float* x, uint16_t* e4m3, uint16_t* e5m2, uint16_t* bf16, uint16_t* f16, \
uint32_t* bf16s,
                           uint32_t* f16s) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(e4m3[i]) : "f"(-x[i]), "f"(x[i]));
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(e5m2[i]) : "f"(-x[i]), "f"(x[i]));
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bf16[i]) : "f"(x[i]));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(f16[i]) : "f"(x[i]));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bf16s[i]) : "f"(-x[i]), "f"(x[i]));
  asm volatile(
      "cvt.rn.f16x2.f32 %0, %1, %2;"
      : "=r"(f16s[i])
      : "f"(-x[i]), "f"(x[i]));
}

__global__ void to_float(const uint16_t* x, uint32_t* e4m3, uint32_t* e5m2, float* f16) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(e4m3[i]) : "h"(x[i]));
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(e5m2[i]) : "h"(x[i]));
  asm("cvt.f32.f16 %0, %1;" : "=f"(f16[i]) : "h"(x[i]));
}

__global__ void approximate(const float* x, float* rcp, float* rsqrt, float* ex2, float* tanh) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(rcp[i]) : "f"(x[i]));
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(rsqrt[i]) : "f"(x[i]));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(ex2[i]) : "f"(x[i]));
  asm("tanh.approx.f32 %0, %1;" : "=f"(tanh[i]) : "f"(x[i]));
}
"""
CONVERSION_ENTRIES = """
extern "C" int run_from_float(const float* x, int64_t count, uint16_t* e4m3, uint16_t* e5m2, uint16_t* bf16, \
uint16_t* f16,
                              uint32_t* bf16s, uint32_t* f16s) {
  from_float<<<count / 256, 256>>>(x, e4m3, e5m2, bf16, f16, bf16s, f16s);
  return cudaGetLastError();
}
extern "C" int run_to_float(const uint16_t* x, int64_t count, uint32_t* e4m3, uint32_t* e5m2, float* f16) {
  to_float<<<count / 256, 256>>>(x, e4m3, e5m2, f16);
  return cudaGetLastError();
}
extern "C" int run_approximate(const float* x, int64_t count, float* rcp, float* rsqrt, float* ex2, float* tanh) {
  approximate<<<count / 256, 256>>>(x, rcp, rsqrt, ex2, tanh);
  return cudaGetLastError();
}
"""


def floats_to_convert():
    """Random bit patterns; every number of 16 bits, and halfway between it and the next."""
    random = np.random.default_rng(0).integers(0, 2**32, 2**14, dtype=np.uint32).view(np.float32)
    tables = [
        np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32) for dtype in (ml_dtypes.bfloat16, np.float16)
    ]
    with np.errstate(all="ignore"):
        halfway = [(table + np.roll(table, -1)) / 2 for table in tables]
    return np.concatenate([random, *tables, *halfway])


def as_halves(low, dtype, nan):
    """What `dtype` makes of numbers, with the device's NaN, beside what it makes of their negatives."""
    bits = [np.where(np.isnan(x), nan, x.astype(dtype).view(np.uint16)) for x in (low, -low)]
    return bits[0].astype(np.uint16), (bits[0] + bits[1].astype(np.uint32) * 65536).astype(np.uint32)


def test_conversions_from_float32_are_those_of_ml_dtypes():
    x = floats_to_convert()
    results = [Result(x.shape, dtype) for dtype in [np.uint16] * 4 + [np.uint32] * 2]
    got = compile_for_cpu(CONVERSIONS, CONVERSION_ENTRIES).call(
        "run_from_float", x, x.size, *results, orders=["forward"]
    )
    for pair, dtype in zip(got, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2), strict=False):
        expected = [reference.quantize(side, dtype, 1)[0].view(np.uint8).astype(np.uint16) for side in (x, -x)]
        assert_same_bits(pair, expected[0] + expected[1] * np.uint16(256))
    with np.errstate(all="ignore"):
        for number, dtype in ((2, ml_dtypes.bfloat16), (3, np.float16)):
            one, two = as_halves(x, dtype, 0x7FFF)
            assert_same_bits(got[number], one)
            assert_same_bits(got[number + 2], two)


def test_conversions_to_float_are_those_of_ml_dtypes():
    x = np.arange(2**16, dtype=np.uint16)
    results = [Result(x.shape, dtype) for dtype in (np.uint32, np.uint32, np.float32)]
    got = compile_for_cpu(CONVERSIONS, CONVERSION_ENTRIES).call("run_to_float", x, x.size, *results, orders=["forward"])
    for pairs, dtype in zip(got, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2), strict=False):
        halves = x.view(np.uint8).view(dtype).astype(np.float16)
        expected = np.where(np.isnan(halves), 0x7FFF, halves.view(np.uint16)).astype(np.uint16)
        assert_same_bits(pairs, expected.view(np.uint32))
    floats = x.view(np.float16).astype(np.float32)
    assert_same_bits(got[2], np.where(np.isnan(floats), np.uint32(0x7FFFFFFF).view(np.float32), floats))


def test_approximations_are_as_wrong_as_ptx_allows():
    x = np.random.default_rng(0).uniform(0.01, 8, 4096).astype(np.float32)
    got = compile_for_cpu(CONVERSIONS, CONVERSION_ENTRIES).call(
        "run_approximate", x, x.size, *[Result(x.shape, np.float32)] * 4
    )
    exact = [
        1 / x.astype(np.float64),
        x.astype(np.float64) ** -0.5,
        2.0 ** x.astype(np.float64),
        np.tanh(x.astype(np.float64)),
    ]
    for values, wanted, error in zip(got, exact, (2.0**-23, 2.0**-22, 2.0**-22, 2.0**-11), strict=True):
        worst = np.max(np.abs(values / wanted - 1))
        assert error / 4 < worst <= error
        assert np.mean(values == wanted.astype(np.float32)) > 0.1  # and right at times


MAGNITUDES = """
__global__ void magnitudes(const uint32_t* x, uint32_t* bf16, uint32_t* bf16_nan, uint32_t* f16, uint32_t* f16_nan,
                           float* f32, float* f32_nan) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t a = x[2 * i], b = x[2 * i + 1];
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(bf16[i]) : "r"(a), "r"(b));
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(bf16_nan[i]) : "r"(a), "r"(b));
  asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(f16[i]) : "r"(a), "r"(b));
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(f16_nan[i]) : "r"(a), "r"(b));
  asm("max.xorsign.abs.f32 %0, %1, %2;" : "=f"(f32[i]) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(f32_nan[i]) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
}
"""


def test_maxima_of_magnitudes_are_those_of_numpy():
    """And their signs are those of products, as if they meant something."""
    entry = """extern "C" int run(const uint32_t* x, uint32_t* a, uint32_t* b, uint32_t* c, uint32_t* d, float* e,
                                  float* f) {
      magnitudes<<<64, 64>>>(x, a, b, c, d, e, f);
      return cudaGetLastError();
    }"""
    x = np.random.default_rng(0).integers(0, 2**32, (4096, 2), dtype=np.uint32)
    x[:1024] |= np.uint32(0x7F807C00)  # infinities and NaNs
    x[:512, 0] &= np.uint32(0xFF80FC00)
    results = [Result((4096,), dtype) for dtype in [np.uint32] * 4 + [np.float32] * 2]
    got = compile_for_cpu(MAGNITUDES, entry).call("run", x, *results, orders=["forward"])
    for number, dtype in enumerate((ml_dtypes.bfloat16, np.float16, np.float32)):
        a, b = (side.copy().view(dtype).astype(np.float32) for side in (x[:, 0], x[:, 1]))
        signs = np.signbit(a) ^ np.signbit(b)
        for result, largest in zip(got[2 * number : 2 * number + 2], (np.fmax, np.maximum), strict=True):
            values, wanted = result.view(dtype).astype(np.float32), largest(np.abs(a), np.abs(b))
            assert np.isnan(wanted).any()
            assert_same_bits(np.abs(values), wanted)
            assert_same_bits(np.signbit(values) & ~np.isnan(wanted), signs & ~np.isnan(wanted))


INTRINSICS = """
__global__ void bytes(const unsigned* x, unsigned* y) {
  const int i = threadIdx.x;
  y[i] = __byte_perm(x[3 * i], x[3 * i + 1], x[3 * i + 2]);
}

__global__ void extremes(const float* x, float* largest, float* smallest) {
  const int i = threadIdx.x;
  largest[i] = fmaxf(x[2 * i], x[2 * i + 1]);
  smallest[i] = min(x[2 * i], x[2 * i + 1]);
}

__global__ void atomics(const unsigned* x, unsigned* sum, unsigned* largest, unsigned* tickets) {
  atomicAdd(sum, x[threadIdx.x]);
  atomicMax(largest, x[threadIdx.x]);
  atomicInc(tickets, 61);
}
"""
INTRINSIC_ENTRIES = """
extern "C" int run_bytes(const unsigned* x, unsigned* y) {
  bytes<<<1, 64>>>(x, y);
  return cudaGetLastError();
}
extern "C" int run_extremes(const float* x, float* largest, float* smallest) {
  extremes<<<1, 64>>>(x, largest, smallest);
  return cudaGetLastError();
}
extern "C" int run_atomics(const unsigned* x, unsigned* sum, unsigned* largest, unsigned* tickets) {
  atomics<<<1, 64>>>(x, sum, largest, tickets);
  return cudaGetLastError();
}
"""


def test_bytes_are_permuted():
    words = np.random.default_rng(0).integers(0, 2**32, (64, 3), dtype=np.uint32)
    (y,) = compile_for_cpu(INTRINSICS, INTRINSIC_ENTRIES).call("run_bytes", words, Result((64,), np.uint32))
    source = words[:, :2].copy().view(np.uint8)
    selected = words[:, 2:] >> np.arange(0, 16, 4, dtype=np.uint32) & 7
    assert_same_bits(y, np.take_along_axis(source, selected.astype(np.int64), axis=1).view(np.uint32)[:, 0])


def test_extremes_pass_over_nan_and_tell_the_zeros_apart():
    special = np.array([0.0, -0.0, 1.5, -2.5, np.inf, -np.inf, np.nan, -np.nan], np.float32)
    pairs = np.stack([grid.reshape(-1) for grid in np.meshgrid(special, special)], axis=1)
    kernels = compile_for_cpu(INTRINSICS, INTRINSIC_ENTRIES)
    got = kernels.call("run_extremes", pairs, Result((64,), np.float32), Result((64,), np.float32))
    for values, sign in zip(got, (1, -1), strict=True):
        with np.errstate(invalid="ignore"):
            order = sign * (np.clip(pairs.astype(np.float64), -1e30, 1e30) + np.copysign(1e-9, pairs))
        order = np.where(np.isnan(pairs), -np.inf, order)
        expected = np.take_along_axis(pairs, order.argmax(1)[:, None], axis=1)[:, 0]
        assert_same_bits(values, np.where(np.isnan(expected), np.uint32(0x7FFFFFFF).view(np.float32), expected))


def test_atomics():
    x = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
    zero = InPlace(np.zeros((), np.uint32))
    got = compile_for_cpu(INTRINSICS, INTRINSIC_ENTRIES).call("run_atomics", x, zero, zero, zero)
    for value, expected in zip(got, (x.sum(dtype=np.uint32), x.max(), 64 % 62), strict=True):
        assert_same_bits(value, np.uint32(expected))


WARPS = """
__global__ void warps(const int* x, int* sums, unsigned* facts) {
  const int i = blockIdx.x * blockDim.x * blockDim.y + threadIdx.y * blockDim.x + threadIdx.x;
  int butterfly = x[i], down = x[i];
  for (int step = 16; step > 0; step /= 2) butterfly += __shfl_xor_sync(0xFFFFFFFFu, butterfly, step);
  for (int step = 16; step > 0; step /= 2) down += __shfl_down_sync(0xFFFFFFFFu, down, step);
  sums[4 * i] = butterfly;
  sums[4 * i + 1] = __shfl_sync(0xFFFFFFFFu, down, 0);
  sums[4 * i + 2] = __reduce_add_sync(0xFFFFFFFFu, x[i]);
  sums[4 * i + 3] = __shfl_up_sync(0xFFFFFFFFu, x[i], 1, 8);
  facts[4 * i] = __ballot_sync(0xFFFFFFFFu, x[i] > 0);
  facts[4 * i + 1] = __any_sync(0xFFFFFFFFu, x[i] > 900);
  facts[4 * i + 2] = __reduce_max_sync(0xFFFFFFFFu, static_cast<unsigned>(x[i]));
  if (i % 2 == 0) {
    facts[4 * i + 3] = __reduce_min_sync(0x55555555u, static_cast<unsigned>(x[i]));  // the even lanes among themselves
  } else {
    facts[4 * i + 3] = 0;
  }
}
"""


def test_what_the_lanes_of_a_warp_do_together():
    entry = """extern "C" int run(const int* x, int* sums, unsigned* facts) {
      warps<<<2, dim3(16, 4)>>>(x, sums, facts);
      return cudaGetLastError();
    }"""
    x = np.random.default_rng(0).integers(-1000, 1000, (4, 32), dtype=np.int32)  # warps, lanes
    sums, facts = compile_for_cpu(WARPS, entry).call(
        "run", x, Result((4, 32, 4), np.int32), Result((4, 32, 4), np.uint32)
    )
    for column in range(3):
        assert_same_bits(sums[..., column], np.broadcast_to(x.sum(1, dtype=np.int32)[:, None], x.shape))
    shifted = np.roll(x, 1, axis=1)
    assert_same_bits(sums[..., 3], np.where(np.arange(32) % 8 == 0, x, shifted))
    ballot = np.packbits(x > 0, axis=1, bitorder="little").view(np.uint32)
    assert_same_bits(facts[..., 0], np.broadcast_to(ballot, x.shape))
    assert_same_bits(facts[..., 1], np.broadcast_to((x > 900).any(1, keepdims=True).astype(np.uint32), x.shape))
    unsigned = x.view(np.uint32)
    assert_same_bits(facts[..., 2], np.broadcast_to(unsigned.max(1, keepdims=True), x.shape))
    even = np.where(np.arange(32) % 2 == 0, unsigned[:, ::2].min(1, keepdims=True), 0).astype(np.uint32)
    assert_same_bits(facts[..., 3], even)


def in_lanes(matrix, *order):
    """What each lane has of a matrix. A row of it is a pair of halves, of 8 each; so is a column of one of 16."""
    halves = matrix.reshape(-1, 8, 2, 4, 2) if matrix.shape[1] == 16 else matrix.reshape(2, 8, 4, 2)
    return np.ascontiguousarray(halves.transpose(order))


def product_in_lanes(a, b, c, change=("", "")):
    """d = a b + c by the instruction of one warp; b [16, 8] is given as its transpose."""
    kind = "f16" if a.dtype == np.float16 else "bf16"
    kernel = f"""__global__ void product(const uint32_t* a, const uint32_t* b, const float* c, float* d) {{
      a += 4 * threadIdx.x, b += 2 * threadIdx.x, c += 4 * threadIdx.x, d += 4 * threadIdx.x;
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, "
                   "{{%8, %9}}, {{%10, %11, %12, %13}};"
                   : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
                     "f"(c[2]), "f"(c[3]));
    }}"""
    entry = """extern "C" int run(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
      product<<<1, 32>>>(a, b, c, d);
      return cudaGetLastError();
    }"""
    # By row, group of four lanes: halves of columns before halves of rows, and pairs of neighbours in a word.
    of_a, of_b = in_lanes(a, 1, 3, 2, 0, 4).view(np.uint32), in_lanes(b.T, 1, 3, 2, 0, 4).view(np.uint32)
    of_c = in_lanes(c, 1, 2, 0, 3)
    (d,) = compile_for_cpu(kernel.replace(*change), entry).call(
        "run", of_a, of_b, of_c, Result((8, 4, 2, 2), np.float32)
    )
    return d.transpose(2, 0, 1, 3).reshape(16, 8)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_products_of_a_warp(dtype):
    random = np.random.default_rng(0)
    a, b = (random.integers(-50, 50, shape).astype(dtype) for shape in ((16, 16), (16, 8)))
    c = random.integers(-50, 50, (16, 8)).astype(np.float32)
    assert_same_bits(product_in_lanes(a, b, c), a.astype(np.float32) @ b.astype(np.float32) + c)
    a[3, 5], b[7, 2] = np.nan, np.inf
    wanted = a.astype(np.float32) @ b.astype(np.float32) + c
    assert_same_bits(np.isnan(product_in_lanes(a, b, c)), np.isnan(wanted))


def test_all_lanes_of_a_warp_must_multiply():
    zeros = np.zeros((16, 16), np.float16)
    with pytest.raises(EmulationError, match="mma"):
        product_in_lanes(zeros, zeros[:, :8], np.zeros((16, 8), np.float32), ("asm", "if (threadIdx.x != 3) asm"))
