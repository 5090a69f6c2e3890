// The softmaxes of groups of lanes, of warps and of blocks become one: each is scaled to the largest logit of all. The
// order never changes.
#pragma once

#include <cstdint>

#include "cached_attention_call.cuh"
#include "cached_attention_softmax.cuh"
#include "cached_attention_token.cuh"
#include "cluster.cuh"

namespace jax_fp8::cached_attention {

// Combines the softmaxes of the warp's groups, and leaves the warp's in shared memory: `parts` [kWarps, kHeads, width].
template <typename C, int kLanes, int kHeads, int kCopies, typename OfBlock>
__device__ inline void combine_groups(Running<kLanes, kHeads>& running, OfBlock& shared, float* parts) {
  constexpr int kHeadLanes = kLanes / kHeads, kWidth = kLanes * kVectorWidth;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const float largest = lanes_max<kWarp / 2, kLanes>(running.largest);
  running.multiply(power_of_2<C>(__fsub_rn(running.largest, largest)));
  const float sum = lanes_sum<kHeadLanes / 2, kCopies>(lanes_sum<kWarp / 2, kLanes>(running.sum));
  if (lane < kLanes && lane % kHeadLanes == 0) {
    shared.largest[warp][lane / kHeadLanes] = largest;
    shared.sums[warp][lane / kHeadLanes] = sum;
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int i = 0; i < kVectorWidth; ++i) {
      running.attended[h][i] = lanes_sum<kWarp / 2, kLanes>(running.attended[h][i]);
    }
    if (lane >= kLanes) continue;
    put_eight(parts + (warp * kHeads + h) * kWidth + lane * kVectorWidth, running.attended[h]);
  }
}

// Combines the warps, in `parts` of the first one and in `block_largest` and `block_sums`.
template <typename C, int kWidth, int kHeads>
__device__ inline void combine_warps(Shared<kWidth, kHeads>& shared, int heads, float* parts) {
  for (int element = static_cast<int>(threadIdx.x); element < heads * kWidth; element += kThreads<kHeads>) {
    const int h = element / kWidth;
    float largest = kLowest, sum = 0.0f, attended = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps<kHeads>; ++warp) largest = fmaxf(largest, shared.largest[warp][h]);
#pragma unroll
    for (int warp = 0; warp < kWarps<kHeads>; ++warp) {
      const float factor = power_of_2<C>(__fsub_rn(shared.largest[warp][h], largest));
      sum = __fmaf_rn(factor, shared.sums[warp][h], sum);
      attended = __fmaf_rn(factor, parts[warp * kHeads * kWidth + element], attended);
    }
    parts[element] = attended;
    if (element % kWidth == 0) shared.block_largest[h] = largest, shared.block_sums[h] = sum;
  }
}

__device__ inline const float* shared_of(const float* own, int block, int blocks) {
  return blocks == 1 ? own : in_block(own, block);
}

// Combines the blocks, each an equal part of the features, and writes the result.
template <typename C, int kWidth, int kHeads>
__device__ inline void combine_blocks(const Call<C>& call, const Part& part, const Shared<kWidth, kHeads>& shared,
                                      const float* parts) {
  constexpr int kMostBlocks = 1 << kMostLog2Blocks;
  const int blocks = call.blocks(), head_dim = call.sizes.head_dim;
  const int64_t first = part.head * call.sizes.queries + part.first_query;
  for (int element = part.block * kThreads<kHeads> + static_cast<int>(threadIdx.x); element < part.queries * kWidth;
       element += blocks * kThreads<kHeads>) {
    const int h = element / kWidth, feature = element % kWidth;
    if (feature >= head_dim) continue;
    // All loads first: each takes some hundred cycles.
    float largest_of[kMostBlocks], sum_of[kMostBlocks], attended_of[kMostBlocks];
    float largest = kLowest, sum = 0.0f, attended = 0.0f;
#pragma unroll
    for (int b = 0; b < kMostBlocks; ++b) {
      const bool exists = b < blocks;
      largest_of[b] = exists ? *shared_of(shared.block_largest + h, b, blocks) : kLowest;
      sum_of[b] = exists ? *shared_of(shared.block_sums + h, b, blocks) : 0.0f;
      attended_of[b] = exists ? *shared_of(parts + element, b, blocks) : 0.0f;
    }
#pragma unroll
    for (int b = 0; b < kMostBlocks; ++b) largest = fmaxf(largest, largest_of[b]);
#pragma unroll
    for (int b = 0; b < kMostBlocks; ++b) {
      const float factor = power_of_2<C>(__fsub_rn(largest_of[b], largest));
      sum = __fmaf_rn(factor, sum_of[b], sum);
      attended = __fmaf_rn(factor, attended_of[b], attended);
    }
    store(call.attended, (first + h) * head_dim + feature, call.type, __fdiv_rn(attended, sum));
  }
}

}  // namespace jax_fp8::cached_attention
