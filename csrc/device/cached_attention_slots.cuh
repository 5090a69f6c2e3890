// Keys and values of a tile of 16 slots, as the lanes of a warp load them for products on the tensor cores.
//
// Lane 4 g + t loads eight neighbouring features at a time, which are words of the operands:
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

constexpr int kTileSlots = 16;

__device__ inline int lane_row() { return static_cast<int>(threadIdx.x) % kWarp / 4; }
__device__ inline int lane_column() { return static_cast<int>(threadIdx.x) % 4; }

template <typename C, int kWidth>
struct Keys {
  Vector<C> rows[2][kWidth / 32];
  float scales[4];  // of the lane's four slots; only in FP8
};

template <typename C, int kWidth>
struct Values {
  Vector<C> rows[4][kWidth / 64];
  float scales[4];
};

template <typename C>
__device__ inline Vector<C> load_features(const C* source) {
  Vector<C> loaded;
  load_words(source, 0, sizeof(loaded), loaded.words);
  return loaded;
}

// The i-th slot of a lane's four.
__device__ inline int slot_of(int i) { return i / 2 * 8 + 2 * lane_column() + i % 2; }

// In place of slots beyond the last one, which have no weight, the last one is loaded again.
template <typename C>
__device__ inline int place_of(const Rows<C>& source, const Seen& seen, int number) {
  return seen.from_first(min(number, source.end - 1));
}

template <typename C>
__device__ inline void load_scales(const Rows<C>& source, const Seen& seen, int first, float (&scales)[4]) {
  if constexpr (kIsFp8<C>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scales[i] = __ldcs(source.scales + place_of(source, seen, first + slot_of(i)));
  }
}

// Whether every head has these features; else a kernel for fewer would do.
template <int kWidth>
__device__ constexpr bool is_always_there(int feature) {
  return kWidth > 64 && feature < kWidth / 2;
}

// Features beyond the last one are 0.
template <typename C, int kWidth>
__device__ inline void load(const Rows<C>& source, const Seen& seen, int first, Keys<C, kWidth>& keys) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int place = place_of(source, seen, first + 8 * j + lane_row());
    const C* row = source.rows + (place * source.head_dim + 8 * lane_column());
#pragma unroll
    for (int c = 0; c < kWidth / 32; ++c) {
      const bool exists = is_always_there<kWidth>(32 * c) || 32 * c + 8 * lane_column() < source.head_dim;
      keys.rows[j][c] = exists ? load_features(row + 32 * c) : filled_with<C>(0);
    }
  }
  load_scales(source, seen, first, keys.scales);
}

// In place of features beyond the last one, whose sums nobody reads, the last ones are loaded again. Loads the steps
// of 64 features from kBegin to kEnd.
template <int kBegin, int kEnd, typename C, int kWidth>
__device__ inline void load(const Rows<C>& source, const Seen& seen, int first, Values<C, kWidth>& values) {
  const int last = source.head_dim - kVectorWidth - 8 * lane_row();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int place = place_of(source, seen, first + slot_of(i));
    const C* row = source.rows + (place * source.head_dim + 8 * lane_row());
#pragma unroll
    for (int c = kBegin; c < kEnd; ++c) {
      const int step = is_always_there<kWidth>(64 * c) ? 64 * c : min(64 * c, last);
      values.rows[i][c] = load_features(row + step);
    }
  }
  if (kBegin == 0) load_scales(source, seen, first, values.scales);
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
