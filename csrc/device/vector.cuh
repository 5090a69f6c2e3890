// Loads: eight neighbouring elements as floats, with 16-byte instructions.
//
// bfloat16 and float16 travel as their bits. That keeps CUDA's own headers for them, and everything those include, out of the build.
#pragma once

#include <cstdint>

namespace jax_fp8 {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

constexpr int kVectorWidth = 8;

__device__ inline float to_float(float value) { return value; }

__device__ inline float to_float(BFloat16 value) { return __uint_as_float(uint32_t{value.bits} << 16); }

__device__ inline float to_float(Float16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

// Two 16-bit values packed into one word, the first in the low half.
__device__ inline void unpack(uint32_t word, float* out, BFloat16) {
  out[0] = __uint_as_float(word << 16);
  out[1] = __uint_as_float(word & 0xFFFF0000u);
}

__device__ inline void unpack(uint32_t word, float* out, Float16) {
  out[0] = to_float(Float16{static_cast<uint16_t>(word)});
  out[1] = to_float(Float16{static_cast<uint16_t>(word >> 16)});
}

template <typename T>
__device__ inline void load_vector(const T* source, float (&out)[kVectorWidth]) {
  const uint4 words = __ldg(reinterpret_cast<const uint4*>(source));
  unpack(words.x, out + 0, T{});
  unpack(words.y, out + 2, T{});
  unpack(words.z, out + 4, T{});
  unpack(words.w, out + 6, T{});
}

__device__ inline void load_vector(const float* source, float (&out)[kVectorWidth]) {
  const float4 low = __ldg(reinterpret_cast<const float4*>(source));
  const float4 high = __ldg(reinterpret_cast<const float4*>(source) + 1);
  out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
  out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}

}  // namespace jax_fp8
