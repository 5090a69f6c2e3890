// The FP8 cast: values = saturate(x * (1 / scale)), rounded once to nearest even.
//
// The hardware cast saturates (infinities included) and turns every NaN into the byte 0x7F, which is a NaN in both formats.
#pragma once

#include <cstdint>

#include "../dtypes.h"

namespace jax_fp8 {

// Rounded to nearest, as the reference divides: an approximate reciprocal differs in the last bit, and bytes then differ too.
// Call it after the loads of x: inverting waits for the scale to arrive, and nothing behind it is issued meanwhile.
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

// Four neighbours in one word, in memory order.
template <Fp8Type kFormat>
__device__ inline uint32_t quantize_four(const float* x, float multiplier) {
  const uint32_t low = cast_pair<kFormat>(__fmul_rn(x[0], multiplier), __fmul_rn(x[1], multiplier));
  const uint32_t high = cast_pair<kFormat>(__fmul_rn(x[2], multiplier), __fmul_rn(x[3], multiplier));
  return low | high << 16;
}

// Four rows of four bytes become four columns of four bytes: word c of the result holds byte c of every row.
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
