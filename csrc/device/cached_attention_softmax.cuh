// A softmax of which each group of lanes sees one slot after the other, several at a time.
//
// A lane has eight features of a slot, so kLanes lanes read a slot's key or value at once, and a warp those of
// 32 / kLanes slots. Their products with kHeads queries are kHeads * kSlots sums over the group's lanes. The steps of
// this reduction divide the sums among the lanes: 15 shuffles for 16 sums over 16 lanes, instead of 64. Each lane then
// has a logit of its own and computes one exponential, instead of all of them.
//
//     sum of head h and slot j        h * kSlots + j, in this order on the lanes of a group
//     lanes of one head               kLanes / kHeads neighbours; they share its maximum
#pragma once

#include <cstdint>

#include "cached_attention_call.cuh"
#include "exponential.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace jax_fp8::cached_attention {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
// The maximum of no logits. It is finite, so that a difference to it is never NaN.
constexpr float kLowest = -3.402823466e38f;

// Sums over each group of kLanes lanes, divided among them in order: a lane keeps kKept sums, or, of fewer sums than
// lanes, neighbours keep copies of one. Every lane of the warp must call it.
template <int kLanes, int kCount, int kKept>
__device__ inline void divide_sums(const float (&sums)[kCount], float (&kept)[kKept]) {
  if constexpr (kLanes == 1) {
    static_assert(kCount == kKept);
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[i] = sums[i];
  } else if constexpr (kCount == 1) {
    kept[0] = warp_sum<kLanes>(sums[0]);
  } else {
    float half[kCount / 2];
    share_sums(sums, half, kLanes / 2);
    divide_sums<kLanes / 2>(half, kept);
  }
}

// The maximum over the lanes of a group that differ in these distances: `most`, most / 2, ... `least`.
template <int kMost, int kLeast = 1>
__device__ inline float lanes_max(float x) {
#pragma unroll
  for (int distance = kMost; distance >= kLeast; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

template <int kMost, int kLeast>
__device__ inline float lanes_sum(float x) {
#pragma unroll
  for (int distance = kMost; distance >= kLeast; distance /= 2) {
    x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

// How the sums of a batch lie on the lanes of a group.
template <int kLanes, int kHeads, int kSlots>
struct Layout {
  static constexpr int kSums = kHeads * kSlots;
  static constexpr int kKept = kSums > kLanes ? kSums / kLanes : 1;
  static constexpr int kCopies = kLanes > kSums ? kLanes / kSums : 1;
  static constexpr int kHeadLanes = kLanes / kHeads;
  static constexpr int kGroups = kWarp / kLanes;    // of a warp
  static constexpr int kBatch = kGroups * kSlots;   // slots that a warp reads at once
  static_assert(kHeads <= kLanes, "a lane has sums of one head");

  // The slot among its batch of the i-th sum that a lane keeps.
  __device__ static int slot_of(int i) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes, group = static_cast<int>(threadIdx.x) % kWarp / kLanes;
    return (lane / kCopies * kKept + i) % kSlots * kGroups + group;
  }
};

// The softmax so far, of the slots that a group has seen.
template <int kLanes, int kHeads>
struct Running {
  float attended[kHeads][kVectorWidth];  // of the lane's features, divided by 2**largest
  float largest;                         // logit, of the lane's head
  float sum;                             // of the weights that the lane computed

  __device__ void start() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kVectorWidth; ++i) attended[h][i] = 0.0f;
    }
    largest = kLowest, sum = 0.0f;
  }

  // Multiplies every head's numbers by the factor that its lanes have.
  __device__ void multiply(float factor) {
    sum = __fmul_rn(sum, factor);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float own = __shfl_sync(kAllLanes, factor, h * (kLanes / kHeads), kLanes);
#pragma unroll
      for (int i = 0; i < kVectorWidth; ++i) attended[h][i] = __fmul_rn(attended[h][i], own);
    }
  }
};

template <int kHeads>
__device__ inline float product(const float (&query)[kHeads][kVectorWidth], const float (&key)[kVectorWidth], int h) {
  float sum = __fmul_rn(query[h][0], key[0]);
#pragma unroll
  for (int i = 1; i < kVectorWidth; ++i) sum = __fmaf_rn(query[h][i], key[i], sum);
  return sum;
}

// Sees the first slot of all, which is the new token's own: its weight is 1.
template <int kLanes, int kHeads>
__device__ inline void begin_with(Running<kLanes, kHeads>& running, const float (&query)[kHeads][kVectorWidth],
                                  const float (&key)[kVectorWidth], float key_scale,
                                  const float (&value)[kVectorWidth], float value_scale, const Logits& logits,
                                  int copies) {
  constexpr int kHeadLanes = kLanes / kHeads;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  float products[kHeads], own[1];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) products[h] = product(query, key, h);
  divide_sums<kLanes>(products, own);
  if (static_cast<int>(threadIdx.x) % kWarp >= kLanes) return;  // one group of the warp
  running.largest = logits.of(__fmul_rn(own[0], key_scale));
  running.sum = lane % kHeadLanes < copies ? 1.0f : 0.0f;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int i = 0; i < kVectorWidth; ++i) running.attended[h][i] = __fmul_rn(value[i], value_scale);
  }
}

}  // namespace jax_fp8::cached_attention
