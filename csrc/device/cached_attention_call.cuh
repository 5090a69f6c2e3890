// The call as the kernel gets it, the part of it that a block has, and the slots of a cache that a new token sees.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fp8.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace jax_fp8::cached_attention {

// Warps of a block. kWidth is 64, 128 or 256: the features of a head, rounded up.
template <int kWidth>
constexpr int kFewWarps = kWidth == 256 ? 8 : 6;
// Of a block with many slots and a multiprocessor for itself. Memory takes so long to answer that a multiprocessor must
// ask for 50 KB or more at once.
template <int kWidth>
constexpr int kMostWarps = kWidth == 64 ? 16 : kWidth == 128 ? 12 : 8;
// With more heads than run at once, a tile in FP8 takes longer to use than to load. Then small blocks are faster: more
// warps share a multiprocessor.
constexpr int kWarpsOfManyHeads = 4;

// Blocks that the registers of a multiprocessor must allow.
template <typename C, int kWidth, int kWarps>
constexpr int kResident = kWarps == kMostWarps<kWidth>   ? 1
                          : kWarps == kWarpsOfManyHeads ? (kWidth == 128 ? 4 : 5)
                          : kWidth == 128 || sizeof(C) == 4 ? 2
                                                            : 3;

constexpr int kMostLog2Blocks = 4;  // of a cluster
constexpr int kMostBlocks = 1 << kMostLog2Blocks;

// The maximum of no logits. It is finite, so that a difference to it is never NaN.
constexpr float kLowest = -3.402823466e38f;

// An element of a cache in FP8. The other caches have float, BFloat16 or Float16.
struct E4M3 {
  uint8_t bits;
};

template <typename C>
constexpr bool kIsFp8 = std::is_same_v<C, E4M3>;

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

// C: an element of the cache. T: one of the new token, and of the result; the same as C unless the cache is in FP8.
template <typename C, typename T>
struct Call {
  const T *query, *key, *value;
  const float *cos, *sin;
  int pairs;
  C *keys, *values;
  float *key_scales, *value_scales;  // null without FP8
  const int32_t *lengths, *step;
  T* attended;                  // or E4M3 by attended_scale, which is null without
  const float* attended_scale;
  Sizes sizes;
  Logits logits;
  int tiles;        // of kHeads queries, in which the queries of a key head are
  int log2_blocks;  // of a tile: the cluster
  bool asks_early;  // for slots, while the kernels that make the new token may still run; lengths and step are there

  __device__ int blocks() const { return 1 << log2_blocks; }
};

// The part of the call that a block has.
struct Part {
  int head;                  // of all rows and key heads
  int row;                   // of the batch
  int first_query, queries;  // of those of the key head
  int block;                 // of its cluster
  bool writes;               // whether this block writes the new token's slot

  // The first block of a cluster sees the new token itself.
  __device__ bool sees_token() const { return block == 0; }
};

template <int kHeads, typename C, typename T>
__device__ inline Part part_of(const Call<C, T>& call) {
  const unsigned tile = blockIdx.x >> call.log2_blocks, head = tile / call.tiles;
  const int row = static_cast<int>(tile / (call.tiles * call.sizes.kv_heads));
  const int first_query = static_cast<int>(tile - head * call.tiles) * kHeads;
  const int block = static_cast<int>(blockIdx.x & (call.blocks() - 1));
  return {static_cast<int>(head), row, first_query, min(call.sizes.queries - first_query, kHeads),
          block, first_query == 0 && block == 0};
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

// Neighbouring slots that a warp takes at once.
struct Tile {
  int slot;   // its first, counted from `Seen::first`
  int count;  // of slots from there on that the block sees without a gap: those of the tile, and those behind it
};

// The slots of a block in tiles of kTile slots, at the places 0, kTile, 2 kTile, ... The first new token begins a tile,
// so the slots of each tile are neighbours.
template <int kTile>
struct Tiles {
  int slot;    // of place 0
  int prompt;  // places of the prompt
  int gap;     // more slots than places before a new token
  int end;     // the place behind the last one

  // Of the slots with the numbers from `first` to `last`, without that one.
  __device__ Tiles(const Seen& seen, int first, int last)
      : slot(first), prompt(max(min(last, seen.prompt) - first, 0)) {
    const int first_new = max(first, seen.prompt), place = (prompt + kTile - 1) / kTile * kTile;
    gap = seen.from_first(first_new) - first - place, end = place + max(last - first_new, 0);
  }

  __device__ Tile at(int place) const {
    const bool is_new = place >= prompt;
    return {slot + place + (is_new ? gap : 0), (is_new ? end : prompt) - place};
  }
};

// The keys or the values of a key head, from the first slot that is seen on.
template <typename C>
struct Rows {
  const C* rows;        // [slots, head_dim]
  const float* scales;  // [slots]
  int head_dim;

  __device__ Rows(const C* all, const float* all_scales, int64_t first, int head_dim)
      : rows(all + first * head_dim), scales(kIsFp8<C> ? all_scales + first : nullptr), head_dim(head_dim) {}
};

}  // namespace jax_fp8::cached_attention
