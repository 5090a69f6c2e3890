// What the threads of a block, and the blocks of a cluster, leave each other in shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "async_copy.cuh"
#include "cached_attention_call.cuh"
#include "cluster.cuh"

namespace jax_fp8::cached_attention {

// The dtype in which the tensor cores get queries, keys and values. float32 has no such products.
template <typename C>
using Operand = std::conditional_t<kIsFp8<C>, Float16, C>;

// A query of float32 beside a cache in FP8 is the sum of two operands.
template <typename C, typename T>
constexpr int kOperands = sizeof(Operand<C>) < sizeof(T) ? 2 : 1;

// Numbers of a wider range are multiplied by a power of two so that float16 holds them: the largest comes to 2**14, and
// below 2**15. What vanishes is less than 2**-38 of it.
constexpr int kLargestOperand = 14;

__device__ inline int exponent_of(float largest) {
  return max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -100);
}

// Queries lie 64 bytes of memory banks apart, so that eight lanes read 16 bytes each of two of them at once.
template <int kWidth>
constexpr int kQueryWidth = kWidth + 32;

// The sums of a warp: [queries, kPartWidth] floats. The four more than features spread the rows over the banks.
template <int kWidth>
constexpr int kPartWidth = kWidth + 4;

template <typename C, typename T, int kWidth, int kHeads>
struct Shared {
  alignas(16) Operand<C> query[kOperands<C, T>][kHeads][kQueryWidth<kWidth>];
  float units[kHeads];  // by which products with these operands are multiplied
  alignas(16) float key[kWidth];
  alignas(16) float value[kWidth];
  float own_logits[kHeads];                                             // with the new token's own key
  float largest[kMostWarps<kWidth>][kHeads], sums[kMostWarps<kWidth>][kHeads];  // of the warps

  // From the blocks of the cluster, side by side: sums of two neighbouring features, and for each query the largest
  // logit and the sum of weights.
  float2 received[kHeads * kWidth / 2];
  float2 received_softmaxes[kHeads * kMostBlocks];
  Barrier arrived;
};

}  // namespace jax_fp8::cached_attention
