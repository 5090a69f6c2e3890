// Maxima of magnitudes, on words with one or two elements as they lie in memory.
//
// One instruction (max.xorsign.abs) compares the elements of two words by magnitude. The sign of its result is the xor
// of both signs and means nothing here. So the sign is dropped when a maximum becomes a float.
#pragma once

#include <cmath>
#include <cstdint>

#include "reduce.cuh"
#include "vector.cuh"

namespace jax_fp8 {

// ---- the larger of two: a number beats a NaN ------------------------------------------------------------------------

__device__ inline uint32_t larger(uint32_t a, uint32_t b, float) {
  float word;
  asm("max.xorsign.abs.f32 %0, %1, %2;" : "=f"(word) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
  return __float_as_uint(word);
}

__device__ inline uint32_t larger(uint32_t a, uint32_t b, BFloat16) {
  uint32_t word;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}

__device__ inline uint32_t larger(uint32_t a, uint32_t b, Float16) {
  uint32_t word;
  asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}

// ---- a NaN is larger than everything --------------------------------------------------------------------------------

__device__ inline uint32_t larger_or_nan(uint32_t a, uint32_t b, float) {
  float word;
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(word) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
  return __float_as_uint(word);
}

__device__ inline uint32_t larger_or_nan(uint32_t a, uint32_t b, BFloat16) {
  uint32_t word;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}

__device__ inline uint32_t larger_or_nan(uint32_t a, uint32_t b, Float16) {
  uint32_t word;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}

// ---- of many --------------------------------------------------------------------------------------------------------

// The larger magnitude of one word's elements. NaNs are ignored; of NaNs alone it is 0.
template <typename T>
__device__ inline float magnitude_of(uint32_t word) {
  float elements[Vector<T>::kPerWord];
  unpack(word, elements, T{});
  float largest = 0.0f;
#pragma unroll
  for (float element : elements) largest = fmaxf(largest, fabsf(element));
  return largest;
}

// Reduces word a and word b to one maximum each, and joins them in one word, that of a first.
template <typename T>
__device__ inline uint32_t join_maxima(uint32_t a, uint32_t b) {
  return larger(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), T{});
}

// One step of a reduction that also divides the words among lanes. Of two lanes `distance` apart, the lower one keeps
// the first half of the words and the upper one the second half, each the maximum of both lanes. Every thread of the
// warp must call it.
template <typename T, int kCount>
__device__ inline void share_maxima(const uint32_t (&words)[kCount], uint32_t (&kept)[kCount / 2], int distance) {
  const bool upper = (threadIdx.x & distance) != 0;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const uint32_t low = words[i], high = words[i + kCount / 2];
    const uint32_t received = __shfl_xor_sync(0xFFFFFFFFu, upper ? low : high, distance);
    kept[i] = larger(upper ? high : low, received, T{});
  }
}

}  // namespace jax_fp8
