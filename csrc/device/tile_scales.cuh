// From the elements in the registers of a block's threads to the scales of the block's rows and columns.
//
// The threads reduce maxima in shared memory. Then each thread computes the scale of one row or of one column. It
// stores the scale in the result, and the multiplier for the elements in shared memory.
#pragma once

#include <cstdint>

#include "by_tile.cuh"
#include "magnitude.cuh"
#include "quantize_tile.cuh"
#include "reduce.cuh"
#include "tile.cuh"
#include "vector.cuh"

namespace jax_fp8 {
namespace by_tile {

using quantize_tile::kGroups;
using quantize_tile::kThreads;
using quantize_tile::kWarps;
using quantize_tile::ValuesTile;

// A block's columns make two halves, each a tile of the transpose. A thread has a patch of 4 rows x 8 columns in each.
constexpr int kHalves = kTile / ValuesTile::kCols;
static_assert(kThreads == 2 * kTile, "a thread finds the scale of a row or of a column");

// A thread's patches of kArrays arrays: of the inputs, or of parts and companion.
template <typename T, int kArrays>
using Patches = Vector<T>[kHalves][kPatchRows][kArrays];

// The shared memory in which the threads of a block exchange maxima, multipliers and sums.
template <typename Producer>
struct Shared {
  static constexpr int kParts = Producer::kParts, kMade = kParts + Producer::kCompanions;
  static constexpr int kWords = kTile / Vector<typename Producer::Element>::kPerWord;  // of 128 maxima
  alignas(16) float row_multipliers[kParts][kTile];
  alignas(16) float column_multipliers[kMade][kTile];
  uint32_t row_maxima[kParts][kWords];
  uint32_t column_maxima[kMade][kWarps][kWords];  // over the rows of each warp
  float warp_maxima[kParts][kWarps];
  alignas(8) float sums[Producer::kSums ? kParts : 1][kHalves][Producer::kSums ? kWarps : 1][ValuesTile::kCols];
};

// ---- maxima ---------------------------------------------------------------------------------------------------------

// The maxima of the rows of patches side by side, separately for each element position of a word.
template <typename T, int kPatches, int kMade, typename Larger>
__device__ inline void find_row_maxima(const Vector<T> (&made)[kPatches][kPatchRows][kMade], int part, Larger larger_of,
                                       uint32_t (&maxima)[kPatchRows]) {
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
    maxima[r] = made[0][r][part].words[0];
#pragma unroll
    for (int i = 1; i < kPatches * Vector<T>::kWords; ++i) {
      maxima[r] = larger_of(maxima[r], made[i / Vector<T>::kWords][r][part].words[i % Vector<T>::kWords]);
    }
  }
}

// The same for the scales, which ignore NaNs. Returns the amax, which is NaN if an element is. The fast path propagates
// NaNs, and only if there was one are the maxima computed again without.
template <typename T, int kPatches, int kMade>
__device__ inline float find_row_maxima(const Vector<T> (&made)[kPatches][kPatchRows][kMade], int part,
                                        uint32_t (&maxima)[kPatchRows]) {
  const auto give_way = [](uint32_t a, uint32_t b) { return larger(a, b, T{}); };
  const auto propagate = [](uint32_t a, uint32_t b) { return larger_or_nan(a, b, T{}); };
  find_row_maxima(made, part, propagate, maxima);
  float of_word[Vector<T>::kPerWord];
  unpack(propagate(propagate(maxima[0], maxima[1]), propagate(maxima[2], maxima[3])), of_word, T{});
  const float amax = amax_of(0.0f, of_word);
  if (amax != amax) find_row_maxima(made, part, give_way, maxima);
  return amax;
}

// The maxima of the columns of a patch.
template <typename T, int kMade>
__device__ inline Vector<T> find_column_maxima(const Vector<T> (&made)[kPatchRows][kMade], int part) {
  Vector<T> maxima;
#pragma unroll
  for (int i = 0; i < Vector<T>::kWords; ++i) {
    const auto word_of = [&](int r) { return made[r][part].words[i]; };
    maxima.words[i] = larger(larger(word_of(0), word_of(1), T{}), larger(word_of(2), word_of(3), T{}), T{});
  }
  return maxima;
}

// Stores the maxima of the rows at `target`, which has those of 128 rows in order, and returns the largest of the
// warp's rows. The maxima of a patch are 2 words of 16-bit elements or 4 of float32. Of the patch's 8 lanes, lane i
// ends up with word i. Every thread of the warp must call it.
template <typename T>
__device__ inline float put_row_maxima(const uint32_t (&maxima)[kPatchRows], int patch, int group, uint32_t* target) {
  constexpr int kWords = kPatchRows / Vector<T>::kPerWord;
  uint32_t two[2], word[1];
  if constexpr (kWords == 4) {
    share_maxima<T>(maxima, two, 2);
  } else {
    two[0] = join_maxima<T>(maxima[0], maxima[1]);
    two[1] = join_maxima<T>(maxima[2], maxima[3]);
  }
  share_maxima<T>(two, word, 1);
#pragma unroll
  for (int distance = kWords; distance < kGroups; distance *= 2) {
    word[0] = larger(word[0], __shfl_xor_sync(0xFFFFFFFFu, word[0], distance), T{});
  }
  if (group < kWords) target[patch * kWords + group] = word[0];
  return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(magnitude_of<T>(word[0]))));
}

// Stores the maxima of the half's columns, over the warp's 16 rows, at `target` in order. Every thread of the warp must
// call it.
template <typename T, int kMade>
__device__ inline void put_column_maxima(const Vector<T> (&made)[kPatchRows][kMade], int part, int half, int group,
                                         uint32_t* target) {
  constexpr int kWords = Vector<T>::kWords;
  const int upper = static_cast<int>(threadIdx.x) / kGroups % kPatchRows;  // of the four patches
  uint32_t two_patches[kWords / 2], four_patches[kWords / 4];
  share_maxima<T>(find_column_maxima(made, part).words, two_patches, 2 * kGroups);
  share_maxima<T>(two_patches, four_patches, kGroups);
#pragma unroll
  for (int i = 0; i < kWords / 4; ++i) {
    target[(half * kGroups + group) * kWords + upper * (kWords / 4) + i] = four_patches[i];
  }
}

// Stores the maxima of all 128 columns at `target` in order.
template <typename T, int kMade>
__device__ inline void put_column_maxima(const Patches<T, kMade>& made, int part, int group, uint32_t* target) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) put_column_maxima(made[half], part, half, group, target);
}

// Stores the maxima of all parts in shared memory. Returns the amax of the thread's elements, which is NaN if one is.
// Every thread of the block must call it.
template <typename Producer, int kMade>
__device__ inline float put_maxima(const Patches<typename Producer::Element, kMade>& made, int patch, int group,
                                   Shared<Producer>& shared) {
  using T = typename Producer::Element;
  const int warp = threadIdx.x / kWarp;
  float thread_amax = 0.0f;
#pragma unroll
  for (int part = 0; part < Producer::kParts; ++part) {
    uint32_t maxima[kPatchRows];
    thread_amax = amax_of(thread_amax, find_row_maxima(made, part, maxima));
    const float warp_maximum = put_row_maxima<T>(maxima, patch, group, shared.row_maxima[part]);
    if (threadIdx.x % kWarp == 0) shared.warp_maxima[part][warp] = warp_maximum;
    put_column_maxima(made, part, group, shared.column_maxima[part][warp]);
  }
  return thread_amax;
}

// ---- scales and sums: half of the threads have a row each, the others a column --------------------------------------

template <typename T>
__device__ inline float element_of(const uint32_t* maxima, int i) {
  return fabsf(to_float(reinterpret_cast<const T*>(maxima)[i]));
}

// The amax of a column over all warps. NaNs are ignored; of NaNs alone it is 0.
template <typename T, int kOfWarps, int kWords>
__device__ inline float column_amax(const uint32_t (&maxima)[kOfWarps][kWords], int column) {
  float amax = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kOfWarps; ++warp) amax = fmaxf(amax, element_of<T>(maxima[warp], column));
  return amax;
}

__device__ inline float tile_amax(const float (&warp_maxima)[kWarps]) {
  float amax = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) amax = fmaxf(amax, warp_maxima[warp]);
  return amax;
}

template <typename Producer>
__device__ inline void find_scales(const Task& task, int64_t tile_row, int64_t tile_col, Shared<Producer>& shared) {
  using T = typename Producer::Element;
  constexpr int kParts = Producer::kParts;
  const TileCast& cast = task.results.cast;
  const int line = threadIdx.x % kTile;
  const bool has_row = threadIdx.x < kTile;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int64_t part_col = part * task.results.width + tile_col;
    if (has_row && cast.values) {
      const float amax = cast.rule.square ? tile_amax(shared.warp_maxima[part])
                                          : fmaxf(0.0f, element_of<T>(shared.row_maxima[part], line));
      shared.row_multipliers[part][line] = keep_row_scale(task, amax, tile_row + line, part_col);
    }
    if (!has_row && cast.values_t) {
      const float amax = cast.rule.square_t ? tile_amax(shared.warp_maxima[part])
                                            : column_amax<T>(shared.column_maxima[part], line);
      shared.column_multipliers[part][line] = keep_column_scale(task, amax, tile_row, part_col + line);
    }
  }
  if constexpr (Producer::kCompanions) {
    if (has_row) {  // these threads take the companion too: their rows were less work than columns
      const float amax = column_amax<T>(shared.column_maxima[kParts], line);
      shared.column_multipliers[kParts][line] = keep_companion_scale(task, amax, tile_row, tile_col + line);
    }
  }
}

template <typename Producer>
__device__ inline void store_sums(const Task& task, int64_t tile_row, int64_t tile_col,
                                  const Shared<Producer>& shared) {
  const int part = threadIdx.x / kTile, column = threadIdx.x % kTile;
  if (part >= Producer::kParts || tile_col + column >= task.results.width) return;
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    sum += shared.sums[part][column / ValuesTile::kCols][warp][column % ValuesTile::kCols];
  }
  task.results.sums.partial[tile_row / kTile * task.cols + part * task.results.width + tile_col + column] = sum;
}

}  // namespace by_tile
}  // namespace jax_fp8
