// The call as the kernel gets it, the part of it that a block has, and the slots of a cache that a new token sees.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../dtypes.h"
#include "fp8.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace jax_fp8::cached_attention {

// Of a block that attends kHeads queries at once. 8 queries need so many registers that a multiprocessor has one block
// only, and with fewer queries it has 2 or 3.
template <int kHeads>
constexpr int kThreads = kHeads == 8 ? 256 : 192;
template <int kHeads>
constexpr int kWarps = kThreads<kHeads> / kWarp;
template <int kHeads>
constexpr int kResident = kHeads == 8 ? 1 : kHeads == 4 ? 2 : 3;  // blocks, which the registers must allow

constexpr int kMostLog2Blocks = 4;  // of a cluster

// An element of a cache in FP8. The other caches have float, BFloat16 or Float16.
struct E4M3 {
  uint8_t bits;
};

template <typename C>
constexpr bool kIsFp8 = std::is_same_v<C, E4M3>;

__device__ inline void unpack(uint32_t word, float* out, E4M3) {
  uncast_pair<Fp8Type::kE4M3>(static_cast<uint16_t>(word), out[0], out[1]);
  uncast_pair<Fp8Type::kE4M3>(static_cast<uint16_t>(word >> 16), out[2], out[3]);
}

// There are few elements of the new token, so their dtype is known at run time only.
__device__ inline void store(void* target, int64_t index, SourceType type, float x) {
  switch (type) {
    case SourceType::kFloat32: static_cast<float*>(target)[index] = x; break;
    case SourceType::kBFloat16: static_cast<BFloat16*>(target)[index] = from_float<BFloat16>(x); break;
    default: static_cast<Float16*>(target)[index] = from_float<Float16>(x);
  }
}

// From a product of query and key to a logit for powers of two: log2(e) times the logit.
struct Logits {
  float inner;  // log2(e) scale, or scale / cap
  float outer;  // log2(e) cap; 0 without a cap

  __device__ float of(float product) const {
    const float x = __fmul_rn(product, inner);
    return outer == 0.0f ? x : __fmul_rn(tanhf(x), outer);
  }
};

struct Sizes {
  int kv_heads, queries, head_dim;
  int slots, prompt_slots;
  int window;  // 0: all
};

template <typename C>
struct Call {
  const void *query, *key, *value;
  SourceType type;  // of these, and of the result
  const float *cos, *sin;
  int pairs;
  C *keys, *values;
  float *key_scales, *value_scales;  // null without FP8
  const int32_t *lengths, *step;
  void* attended;
  Sizes sizes;
  Logits logits;
  int tiles;        // of kHeads queries, in which the queries of a key head are
  int log2_blocks;  // of a tile: the cluster

  __device__ int blocks() const { return 1 << log2_blocks; }
};

// The part of the call that a block has.
struct Part {
  int64_t head;              // of all rows and key heads
  int row;                   // of the batch
  int first_query, queries;  // of those of the key head
  int block;                 // of its cluster
  bool writes;               // whether this block writes the new token's slot
};

template <int kHeads, typename C>
__device__ inline Part part_of(const Call<C>& call) {
  const unsigned tile = blockIdx.x >> call.log2_blocks, head = tile / call.tiles;
  const int first_query = static_cast<int>(tile - head * call.tiles) * kHeads;
  const int block = static_cast<int>(blockIdx.x & (call.blocks() - 1));
  return {head, static_cast<int>(head / call.sizes.kv_heads), first_query,
          min(call.sizes.queries - first_query, kHeads), block, first_query == 0 && block == 0};
}

// ---- slots that are seen --------------------------------------------------------------------------------------------

// The slots that the new token sees beside its own, numbered without gaps: those of the prompt, then those of earlier
// new tokens.
struct Seen {
  int prompt, count;  // how many of the prompt, and of both
  int first;          // slot
  int gap;            // slots between the prompt's last and the first of a new token, none of which is seen
  int own;            // the new token's slot

  // The slot of a number, counted from `first`.
  __device__ int from_first(int number) const { return number < prompt ? number : number + gap; }
};

__device__ inline Seen seen_by(int length, int step, const Sizes& sizes) {
  length = min(max(length, 0), sizes.prompt_slots);
  step = min(max(step, 0), sizes.slots - sizes.prompt_slots - 1);
  // Positions below `hidden` are outside the window. New token i has the position length + i.
  const int hidden = sizes.window == 0 ? 0 : max(length + step - (sizes.window - 1), 0);
  const int first = min(hidden, length), first_step = max(hidden - length, 0), prompt = length - first;
  return {prompt, prompt + (step - first_step), first, sizes.prompt_slots + first_step - length,
          sizes.prompt_slots + step};
}

}  // namespace jax_fp8::cached_attention
