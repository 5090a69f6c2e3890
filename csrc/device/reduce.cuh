// Reductions over the threads of a warp or a block: the amax of a tensor, a maximum, and sums in an order that never
// changes.
#pragma once

#include <cstdint>

namespace jax_fp8 {

constexpr int kWarp = 32;

// ---- amax: max|x|, NaN where there is one; one atomic per block -----------------------------------------------------
//
// The bits of non-negative floats, read as integers, have the same order as the floats, with infinity above all numbers
// and NaN above infinity. So an integer maximum is exact, does not depend on the order of blocks, and starts from zero.

// max(amax, |x|), or NaN if one is NaN; fmaxf would return the other operand.
__device__ inline float amax_of(float amax, float x) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(amax), "f"(fabsf(x)));
  return larger;
}

template <int kCount>
__device__ inline float amax_of(float amax, const float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) amax = amax_of(amax, x[i]);
  return amax;
}

// Merges the block's amax into `amax` with at most one atomic. Every thread of the block must call it. It contains a
// barrier.
template <int kThreads>
__device__ inline void merge_amax(float thread_amax, float* amax) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && kWarps <= kWarp, "one warp reduces the maxima of all warps");
  __shared__ uint32_t warp_amax[kWarps];
  const uint32_t bits = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(thread_amax));
  if (threadIdx.x % kWarp == 0) warp_amax[threadIdx.x / kWarp] = bits;
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  const uint32_t block_bits = __reduce_max_sync(0xFFFFFFFFu, threadIdx.x < kWarps ? warp_amax[threadIdx.x] : 0u);
  if (threadIdx.x == 0 && block_bits != 0) atomicMax(reinterpret_cast<unsigned int*>(amax), block_bits);
}

// ---- sums -----------------------------------------------------------------------------------------------------------

// The sum over the warp, or over each group of kLanes neighbouring lanes. Every lane gets it.
template <int kLanes = kWarp>
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x = __fadd_rn(x, __shfl_xor_sync(0xFFFFFFFFu, x, distance));
  }
  return x;
}

// One step of a reduction that also divides the numbers among lanes. Of two lanes `distance` apart, the lower one keeps
// the first half of the numbers and the upper one the second half, each the sum of both lanes. Every thread of the warp
// must call it.
template <int kCount>
__device__ inline void share_sums(const float (&x)[kCount], float (&kept)[kCount / 2], int distance) {
  const bool upper = (threadIdx.x & distance) != 0;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float low = x[i], high = x[i + kCount / 2];
    kept[i] = __fadd_rn(upper ? high : low, __shfl_xor_sync(0xFFFFFFFFu, upper ? low : high, distance));
  }
}

// Four sums over the warp with six shuffles instead of twenty: the first two steps divide the sums among the lanes.
// Lane i gets sum i / 8.
constexpr int kLanesPerSum = kWarp / 4;

__device__ inline float four_warp_sums(const float (&x)[4]) {
  const auto halve = [](float low, float high, int distance) {
    const bool is_high = (threadIdx.x & distance) != 0;
    return __fadd_rn(is_high ? high : low, __shfl_xor_sync(0xFFFFFFFFu, is_high ? low : high, distance));
  };
  const float first = halve(x[0], x[2], 16), second = halve(x[1], x[3], 16);
  return warp_sum<kLanesPerSum>(halve(first, second, 8));
}

// Sums over the block; every thread gets them. The next call needs other scratch memory, or a barrier in between.
template <int kCount>
__device__ inline void block_sums(float (&values)[kCount], float (&scratch)[kWarp][kCount]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = warp_sum(values[i]);
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scratch[warp][i] = values[i];
  }
  __syncthreads();
  const bool filled = lane < static_cast<int>(blockDim.x) / kWarp;
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = warp_sum(filled ? scratch[lane][i] : 0.0f);
}

// ---- a maximum ------------------------------------------------------------------------------------------------------

// The maximum over the warp, without NaNs.
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, distance));
  return x;
}

// The maximum over the block; every thread gets it. Scratch memory as for block_sums.
__device__ inline float block_max(float x, float (&scratch)[kWarp]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  x = warp_max(x);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  return warp_max(lane < static_cast<int>(blockDim.x) / kWarp ? scratch[lane] : x);
}

}  // namespace jax_fp8
