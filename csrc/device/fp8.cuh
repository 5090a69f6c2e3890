// The FP8 cast: values = saturate(x * (1 / scale)), rounded once to nearest even.
//
// The hardware cast saturates (infinities included) and turns every NaN into the byte 0x7F,
// which is a NaN in both formats.
#pragma once

#include <cstdint>

#include "../dtypes.h"
#include "vector.cuh"

namespace jax_fp8 {

// 1 / scale, rounded to nearest like the reference's division. An approximate reciprocal would differ in the last bit,
// and then FP8 bytes would differ too. Call it after the loads of x: it waits for the load of the scale, and the thread
// issues nothing meanwhile.
__device__ inline float multiplier_of(float scale) { return __frcp_rn(scale); }

// Two FP8 bytes, the first in the low half.
template <Fp8Type kFormat>
__device__ inline uint32_t cast_pair(float first, float second) {
  uint16_t bytes;
  if constexpr (kFormat == Fp8Type::kE4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(second), "f"(first));
  }
  return bytes;
}

template <Fp8Type kFormat>
__device__ inline uint8_t quantize_one(float x, float multiplier) {
  return static_cast<uint8_t>(cast_pair<kFormat>(__fmul_rn(x, multiplier), 0.0f));
}

// Four neighbours in one word, in memory order (the first in the low byte).
template <Fp8Type kFormat>
__device__ inline uint32_t quantize_four(const float* x, float multiplier) {
  const uint32_t low = cast_pair<kFormat>(__fmul_rn(x[0], multiplier), __fmul_rn(x[1], multiplier));
  const uint32_t high = cast_pair<kFormat>(__fmul_rn(x[2], multiplier), __fmul_rn(x[3], multiplier));
  return low | high << 16;
}

// The same with a multiplier for each element.
template <Fp8Type kFormat>
__device__ inline uint32_t quantize_four(const float* x, const float* multipliers) {
  const uint32_t low = cast_pair<kFormat>(__fmul_rn(x[0], multipliers[0]), __fmul_rn(x[1], multipliers[1]));
  const uint32_t high = cast_pair<kFormat>(__fmul_rn(x[2], multipliers[2]), __fmul_rn(x[3], multipliers[3]));
  return low | high << 16;
}

// ---- back to float, and rounding up or down at random ---------------------------------------------------------------

// Two floats from two FP8 bytes, by way of float16, which represents every FP8 value exactly.
template <Fp8Type kFormat>
__device__ inline void uncast_pair(uint16_t bytes, float& first, float& second) {
  uint32_t halves;
  if constexpr (kFormat == Fp8Type::kE4M3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bytes));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(bytes));
  }
  first = to_float(Float16{static_cast<uint16_t>(halves)});
  second = to_float(Float16{static_cast<uint16_t>(halves >> 16)});
}

template <Fp8Type kFormat>
constexpr float kFp8Max = kFormat == Fp8Type::kE4M3 ? 448.0f : 57344.0f;
template <Fp8Type kFormat>
constexpr int kFp8MinExponent = kFormat == Fp8Type::kE4M3 ? -6 : -14;
template <Fp8Type kFormat>
constexpr int kFp8MantissaBits = kFormat == Fp8Type::kE4M3 ? 3 : 2;

__device__ inline float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

// Stochastic rounding of x >= 0: one of the two FP8 values around it, each with a probability that makes the mean x. So
// a running mean does not stall where its increments are below half a step. The upper 20 bits of `draw` decide.
template <Fp8Type kFormat>
__device__ inline float round_at_random(float x, uint32_t draw) {
  constexpr int kMantissa = kFp8MantissaBits<kFormat>;
  const float bounded = fminf(x, kFp8Max<kFormat>);
  const int exponent = max(static_cast<int>(__float_as_uint(bounded) >> 23) - 127, kFp8MinExponent<kFormat>);
  const float uniform = __fmul_rn(static_cast<float>(draw >> 12), 0x1p-20f);
  const float steps = floorf(__fadd_rn(__fmul_rn(bounded, power_of_two(kMantissa - exponent)), uniform));
  const float rounded = fminf(__fmul_rn(steps, power_of_two(exponent - kMantissa)), kFp8Max<kFormat>);
  return x != x ? x : rounded;
}

template <Fp8Type kFormat>
constexpr float kSmallestFp8 = kFormat == Fp8Type::kE4M3 ? 0x1p-9f : 0x1p-16f;

// ---- from an amax to a scale: jax_fp8/core/scale.py, bit for bit ----------------------------------------------------

struct AmaxRule {
  float headroom;      // 2**margin
  float amax_epsilon;  // smallest amax
  bool power_2_scale;
};

// The scale is 1 where the amax is 0, infinite or NaN. No comparison holds for a NaN, so amax_epsilon does not replace
// it.
template <Fp8Type kFormat>
__device__ inline float scale_from_amax(float amax, const AmaxRule& rule) {
  const float largest = amax < rule.amax_epsilon ? rule.amax_epsilon : amax;
  if (!(largest > 0.0f && largest < __int_as_float(0x7F800000))) return 1.0f;
  const float quotient = __fdiv_rn(__fmul_rn(largest, rule.headroom), kFp8Max<kFormat>);
  const float scale = fminf(fmaxf(quotient, 0x1p-126f), 0x1p126f);
  // Rounds up to a power of two: adding 0x7FFFFF carries into the exponent unless the mantissa is zero.
  return rule.power_2_scale ? __uint_as_float((__float_as_uint(scale) + 0x7FFFFFu) & 0xFF800000u) : scale;
}

// ---- transpose ------------------------------------------------------------------------------------------------------

// Transposes four rows of four bytes with eight byte permutations: word c of the result holds byte c of every row.
__device__ inline void transpose_bytes(const uint32_t (&row)[4], uint32_t (&column)[4]) {
  const uint32_t low01 = __byte_perm(row[0], row[1], 0x5140);   // a0 b0 a1 b1
  const uint32_t low23 = __byte_perm(row[2], row[3], 0x5140);   // c0 d0 c1 d1
  const uint32_t high01 = __byte_perm(row[0], row[1], 0x7362);  // a2 b2 a3 b3
  const uint32_t high23 = __byte_perm(row[2], row[3], 0x7362);  // c2 d2 c3 d3
  column[0] = __byte_perm(low01, low23, 0x5410);
  column[1] = __byte_perm(low01, low23, 0x7632);
  column[2] = __byte_perm(high01, high23, 0x5410);
  column[3] = __byte_perm(high01, high23, 0x7632);
}

}  // namespace jax_fp8
