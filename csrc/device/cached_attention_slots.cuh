// Keys and values of a tile of 16 or 32 slots, as the lanes of a warp load them for products on the tensor cores.
//
// Lane 4 g + t loads eight neighbouring features at a time, which are words of the operands. Of 16 slots:
//
//     keys      of slots g and g + 8: the features from 8 t on, in steps of 32
//     values    of slots 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: the features from 8 g on, in steps of 64
#pragma once

#include <cstdint>

#include "cached_attention_call.cuh"
#include "mma.cuh"
#include "vector.cuh"
#include "words.cuh"

namespace jax_fp8::cached_attention {

// Of a tile: more where 16 are few bytes.
template <typename C, int kWidth, int kWarps>
constexpr int kTileSlots = kIsFp8<C> && kWarps == kMostWarps<kWidth> && kWidth == 64 ? 32 : 16;

__device__ inline int lane_row() { return static_cast<int>(threadIdx.x) % kWarp / 4; }
__device__ inline int lane_column() { return static_cast<int>(threadIdx.x) % 4; }

template <typename C, int kWidth, int kTile>
struct Keys {
  Vector<C> rows[kTile / 8][kWidth / 32];
  float scales[kTile / 4];  // of the lane's slots; only in FP8
};

template <typename C, int kWidth, int kTile>
struct Values {
  Vector<C> rows[kTile / 4][kWidth / 64];
  float scales[kTile / 4];
};

template <typename C>
__device__ inline Vector<C> load_features(const C* source) {
  Vector<C> loaded;
  load_words(source, 0, sizeof(loaded), loaded.words);
  return loaded;
}

// The i-th slot of a lane: it has four of each 16.
__device__ inline int slot_of(int i) { return i / 2 * 8 + 2 * lane_column() + i % 2; }

// In place of slots beyond the last one, which have no weight, the last one is loaded again.
__device__ inline unsigned seen_slot(const Tile& tile, int slot) { return min(slot, tile.count - 1); }

// The compiler keeps this address; else it would add up all parts of each address again.
template <typename X>
__device__ inline const X* as_one_number(const X* address) {
  asm("" : "+l"(address));
  return address;
}

template <typename C>
__device__ inline const C* first_of(const Rows<C>& source, const Tile& tile) {
  const C* first = source.rows + tile.slot * source.head_dim;
  return kIsFp8<C> ? as_one_number(first) : first;
}

template <typename C, int kCount>
__device__ inline void load_scales(const Rows<C>& source, const Tile& tile, float (&scales)[kCount]) {
  if constexpr (kIsFp8<C>) {
    const float* first = as_one_number(source.scales + tile.slot);
#pragma unroll
    for (int i = 0; i < kCount; ++i) scales[i] = __ldcs(first + seen_slot(tile, slot_of(i)));
  }
}

// Whether every head has these features; else a kernel for fewer would do.
template <int kWidth>
__device__ constexpr bool is_always_there(int feature) {
  return kWidth > 64 && feature < kWidth / 2;
}

// Features beyond the last one are 0.
template <typename C, int kWidth, int kTile>
__device__ inline void load(const Rows<C>& source, const Tile& tile, Keys<C, kWidth, kTile>& keys) {
  const C* first = first_of(source, tile);
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) {
    const C* row = first + (seen_slot(tile, 8 * j + lane_row()) * source.head_dim + 8 * lane_column());
#pragma unroll
    for (int c = 0; c < kWidth / 32; ++c) {
      const bool exists = is_always_there<kWidth>(32 * c) || 32 * c + 8 * lane_column() < source.head_dim;
      keys.rows[j][c] = exists ? load_features(row + 32 * c) : filled_with<C>(0);
    }
  }
  load_scales(source, tile, keys.scales);
}

// In place of features beyond the last one, whose sums nobody reads, the last ones are loaded again. Loads the steps
// of 64 features from kBegin to kEnd.
template <int kBegin, int kEnd, typename C, int kWidth, int kTile>
__device__ inline void load(const Rows<C>& source, const Tile& tile, Values<C, kWidth, kTile>& values) {
  const C* first = first_of(source, tile);
  const int last = source.head_dim - kVectorWidth - 8 * lane_row();
#pragma unroll
  for (int i = 0; i < kTile / 4; ++i) {
    const C* row = first + (seen_slot(tile, slot_of(i)) * source.head_dim + 8 * lane_row());
#pragma unroll
    for (int c = kBegin; c < kEnd; ++c) {
      const int step = is_always_there<kWidth>(64 * c) ? 64 * c : min(64 * c, last);
      values.rows[i][c] = load_features(row + step);
    }
  }
  if (kBegin == 0) load_scales(source, tile, values.scales);
}

// Eight features as operands: pairs of neighbours.
template <typename C>
__device__ inline void to_operands(const Vector<C>& features, uint32_t (&words)[4]) {
  if constexpr (kIsFp8<C>) {
    widen(features.words[0], words[0], words[1], Float16{}), widen(features.words[1], words[2], words[3], Float16{});
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = features.words[i];
  }
}

}  // namespace jax_fp8::cached_attention
