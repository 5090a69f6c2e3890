// The amax of a tensor: max|x| over everything but NaN, one atomic per block.
//
// Non-negative floats order as their bits, so an integer maximum is exact, independent of the order of blocks, and needs
// nothing but a zero to start from.
#pragma once

#include <cstdint>

namespace jax_fp8 {

// fmaxf returns the other operand when one is NaN, so NaN never enters.
__device__ inline float amax_of(float amax, float x) { return fmaxf(amax, fabsf(x)); }

template <int kCount>
__device__ inline float amax_of(float amax, const float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) amax = amax_of(amax, x[i]);
  return amax;
}

// Every thread of the block must arrive.
template <int kThreads>
__device__ inline void merge_amax(float thread_amax, float* amax) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32, "one warp reduces the maxima of all warps");
  __shared__ uint32_t warp_amax[kWarps];
  const uint32_t bits = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(thread_amax));
  if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = bits;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const uint32_t block_bits = __reduce_max_sync(0xFFFFFFFFu, threadIdx.x < kWarps ? warp_amax[threadIdx.x] : 0u);
  if (threadIdx.x == 0 && block_bits != 0) atomicMax(reinterpret_cast<unsigned int*>(amax), block_bits);
}

}  // namespace jax_fp8
