// Packs Adam's moments into the dtypes in which they are stored, like jax_fp8/kernels/storage.py, bit for bit.
//
// Moments below float32 are rounded stochastically: rounded to nearest, a running mean would not move where its
// increments are below half a step. In FP8, nu is stored as its square root, whose range is smaller.
#pragma once

#include <cstdint>

#include "draws.cuh"
#include "fp8.cuh"
#include "roots.cuh"
#include "words.cuh"

namespace jax_fp8 {

template <Fp8Type kFormat, int kCount>
__device__ inline uint32_t quantize_root(const float (&v)[kCount], float multiplier, const uint32_t (&draws)[kCount]) {
  float rounded[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) rounded[i] = v[i];
  take_roots(rounded);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float x = __fmul_rn(rounded[i], multiplier);
    rounded[i] = round_at_random<kFormat>(x, draws[i]);
    if (rounded[i] == 0.0f && x > 0.0f) rounded[i] = kSmallestFp8<kFormat>;  // the update divides by it
  }
  return pack_fp8<kFormat>(rounded);
}

template <Fp8Type kFormat, int kCount>
__device__ inline uint32_t quantize_at_random(const float (&m)[kCount], float multiplier,
                                              const uint32_t (&draws)[kCount]) {
  float rounded[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float x = __fmul_rn(m[i], multiplier);
    rounded[i] = copysignf(round_at_random<kFormat>(fabsf(x), draws[i]), x);
  }
  return pack_fp8<kFormat>(rounded);
}

// Rounds mu with a second random number of each element; nu uses the first.
template <int kCount>
__device__ inline void pack_mu(float multiplier, Storage storage, const float (&m)[kCount],
                               const uint32_t (&draws)[kCount], uint32_t* words) {
  if (storage == Storage::kFloat32) return pack_floats(storage, m, words);
  uint32_t second[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) second[i] = second_draw(draws[i]);
  if (storage == Storage::kE4M3) {
    words[0] = quantize_at_random<Fp8Type::kE4M3>(m, multiplier, second);
  } else if (storage == Storage::kE5M2) {
    words[0] = quantize_at_random<Fp8Type::kE5M2>(m, multiplier, second);
  } else {
    pack_at_random<false>(m, second, words);
  }
}

// Rounds nu, the second moment. A positive nu stays positive, since the update divides by its root.
template <int kCount>
__device__ inline void pack_nu(float multiplier, Storage storage, const float (&v)[kCount],
                               const uint32_t (&draws)[kCount], uint32_t* words) {
  if (storage == Storage::kE4M3) {
    words[0] = quantize_root<Fp8Type::kE4M3>(v, multiplier, draws);
  } else if (storage == Storage::kE5M2) {
    words[0] = quantize_root<Fp8Type::kE5M2>(v, multiplier, draws);
  } else if (storage == Storage::kFloat32) {
    pack_floats(storage, v, words);
  } else {
    pack_at_random<true>(v, draws, words);
  }
}

}  // namespace jax_fp8
