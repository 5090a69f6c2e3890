// The norm by clusters of blocks that share the columns, with the cast by tiles: every 1 x 128 elements along a row
// have a scale, and for the transpose every 1 x 128 along a column. It reads x once.
//
// A tile along a column needs 128 rows. A block has 64 of them, a band, so that two blocks fit on a multiprocessor, and
// a cluster has two bands of up to 8 blocks side by side. The blocks of a cluster exchange data twice. First come the
// statistics of rows, as in device/norm_parts.cuh. Then come the maxima of columns, which the two blocks with the same
// columns send to each other. In between, a warp works on its own: it has whole tiles of its rows, computes their
// scales, and stores the rowwise values while the maxima of columns travel.
//
//     16-bit: 64 KB of loads in flight per block, 2 blocks per multiprocessor, so that one loads while the other
//             computes; 62 KB of shared memory each, of which the transpose is 32 KB; 64 registers per thread, half of
//             them x, which the normalized elements replace
//             [16384, 2048]: 128 clusters of 8 blocks, 3.9 times as many as 132 multiprocessors run at once
#pragma once

#include <cstdint>

#include "by_tile.cuh"
#include "cluster.cuh"
#include "magnitude.cuh"
#include "norm.cuh"
#include "norm_parts.cuh"
#include "quantize_by_tile.cuh"
#include "quantize_tile.cuh"
#include "reduce.cuh"
#include "tile.cuh"
#include "tile_patches.cuh"
#include "tile_scales.cuh"
#include "vector.cuh"

namespace jax_fp8::norm_by_tile {

using norm::kLaneVectors;
using norm::kWarpRows;

constexpr int kRows = 64;              // of a band
constexpr int kBands = kTile / kRows;  // of a cluster
constexpr int kMostParts = norm::kMostParts / kBands;
constexpr int kThreads = kRows / kWarpRows * kWarp;
constexpr int kWarps = kThreads / kWarp;
constexpr int kOccupancy = 2;  // blocks per multiprocessor, which the registers must allow
static_assert(kBands == 2, "each block has one that it must tell the maxima of its columns");

template <typename T>
constexpr int kCols = norm::kClusterCols<T>;

using BandTile = Tile<kVectorWidth, kWarp, kRows>;  // as wide as a vector of each lane
template <typename T>
constexpr int kStagedBytes = kLaneVectors<T> * BandTile::kChunks * static_cast<int>(sizeof(uint4));

// A patch for each of the lane's vectors, in the form that the functions of by_tile:: take.
template <typename T>
using Made = Vector<T>[kLaneVectors<T>][1][kPatchRows][1];

template <typename T>
using Known = norm::Known<T, kRows, kMostParts>;

template <typename T>
struct Shared {
  alignas(16) float row_multipliers[kCols<T> / kTile][kRows];
  alignas(16) float column_multipliers[kCols<T>];
  alignas(16) uint32_t column_maxima[kWarps][kCols<T> / Vector<T>::kPerWord];  // over the rows of each warp
  float other_maxima[kCols<T>];                                                // from the other band's block
};

template <typename T>
constexpr int kCarveout =
    100 * kOccupancy * (kStagedBytes<T> + sizeof(Known<T>) + sizeof(Shared<T>) + 2048) / (228 * 1024) + 1;

template <typename T>
__device__ inline void make(const norm::Patch<T>& patch, const Known<T>& known, Made<T>& made) {
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
  for (int v = 0; v < kLaneVectors<T>; ++v) {
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) made[v][0][r][0] = patch.rows[v][r];
    if (!patch.holds(v)) continue;
    float norm_scale[kVectorWidth], norm_bias[kVectorWidth];
    norm::read_parameter<T>(known.parameters, 0, v * kWarp + lane, norm_scale);
    norm::read_parameter<T>(known.parameters, 1, v * kWarp + lane, norm_bias);
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      const norm::Statistics of_row = known.statistics[warp * kWarpRows + r];
      float x[kVectorWidth];
      unpack(patch.rows[v][r], x);
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) {
        x[j] = norm::normalized(x[j], of_row.mean, of_row.rstd, norm_scale[j], norm_bias[j]);
      }
      pack(x, made[v][0][r][0]);
    }
  }
}

// The tile along a row, within the block, to which the lane's vector v belongs.
__device__ inline int tile_of(int v) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  return (v * kWarp + lane) * kVectorWidth / kTile;
}

// Reduces the row maxima over the 16 lanes that share a tile. A lane brings 4 words, with one row of float32 each or
// two rows of 16 bits, and lane i ends up with word i / 4. Every thread of the warp must call it.
template <typename T>
__device__ inline uint32_t share_row_maxima(const uint32_t (&maxima)[kLaneVectors<T>][kPatchRows]) {
  uint32_t words[4], two[2], word[1];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (Vector<T>::kPerWord == 1) {
      words[i] = maxima[0][i];
    } else {
      words[i] = join_maxima<T>(maxima[i / 2][i % 2 * 2], maxima[i / 2][i % 2 * 2 + 1]);
    }
  }
  share_maxima<T>(words, two, 8);
  share_maxima<T>(two, word, 4);
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2) {
    word[0] = larger(word[0], __shfl_xor_sync(0xFFFFFFFFu, word[0], distance), T{});
  }
  return word[0];
}

// Computes the scales of the warp's rows, one for each lane.
template <typename T>
__device__ inline void find_row_scales(const by_tile::Task& task, const norm::Place& place, uint32_t maxima,
                                       Shared<T>& shared) {
  constexpr int kPerWord = Vector<T>::kPerWord;
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  float elements[kPerWord];
  unpack(maxima, elements, T{});
  const float element = lane % kPerWord == 0 ? elements[0] : elements[kPerWord - 1];
  const int which = lane / 4 % 4 * kPerWord + lane % kPerWord;  // of the rows of all vectors
  const int tile = tile_of(which / kPatchRows), row = warp * kWarpRows + which % kPatchRows;
  const int64_t col = tile * kTile < place.cols ? place.first_col + tile * kTile : task.cols;
  shared.row_multipliers[tile][row] =
      by_tile::keep_row_scale(task, fmaxf(0.0f, fabsf(element)), place.first_row + row, col);
  __syncwarp();
}

template <typename T>
__device__ inline void store_rows(const by_tile::Task& task, const norm::Place& place, const norm::Patch<T>& patch,
                                  const Made<T>& made, const Shared<T>& shared) {
  const int row = static_cast<int>(threadIdx.x / kWarp) * kWarpRows;
#pragma unroll
  for (int v = 0; v < kLaneVectors<T>; ++v) {
    if (!patch.holds(v)) continue;
    const by_tile::PatchCast cast{
        .row_multipliers = shared.row_multipliers[tile_of(v)] + row,
        .values = task.results.cast.values + (place.first_row + row) * task.cols + place.first_col + patch.col_of(v),
        .stride = task.cols,
        .inside = true,
    };
    uint32_t left[kPatchRows], right[kPatchRows];
    float sums[kVectorWidth] = {};  // column sums, which nobody needs here
    by_tile::cast_patch<true, false>(made[v][0], 0, cast, left, right, sums);
  }
}

template <typename T>
__device__ inline void store_columns(const by_tile::Task& task, const norm::Place& place, const norm::Patch<T>& patch,
                                     const Made<T>& made, const Shared<T>& shared, uint4* staged) {
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
  for (int v = 0; v < kLaneVectors<T>; ++v) {
    if (!patch.holds(v)) continue;
    const by_tile::PatchCast cast{.column_multipliers = shared.column_multipliers + patch.col_of(v)};
    uint32_t left[kPatchRows], right[kPatchRows];
    float sums[kVectorWidth] = {};  // column sums, which nobody needs here
    by_tile::cast_patch<false, true>(made[v][0], 0, cast, left, right, sums);
    quantize_tile::put_patch<BandTile>(staged + v * BandTile::kChunks, warp, lane, left, right);
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kLaneVectors<T>; ++v) {
    BandTile::store<kThreads>(staged + v * BandTile::kChunks, place.first_row, place.first_col + v * BandTile::kCols,
                              task.results.rows, place.first_col + place.cols, task.results.cast.values_t);
  }
}

// Rows and cols are multiples of 16, cols at most kCols << log2_blocks, pointers multiples of 16 bytes; where there are
// blocks side by side each has whole tiles. Tiles are 1 x 128. Dynamic shared memory: the transpose.
template <typename T>
__global__ void __launch_bounds__(kThreads, kOccupancy)
    cluster_kernel(norm::Rows<T> input, int log2_blocks, float* mean, float* rstd, by_tile::Task task) {
  extern __shared__ uint4 staged[];
  __shared__ Known<T> known;
  __shared__ Shared<T> shared;
  const norm::Place place = norm::place_of(static_cast<int>(input.cols), kRows, log2_blocks);
  const int band = static_cast<int>(blockIdx.x >> log2_blocks) % kBands;
  norm::Patch<T> patch = {};  // elements outside of the matrix are zeros, which change no maximum
  norm::find_statistics(input, place, band << log2_blocks, mean, rstd, patch, known);
  Made<T> made;
  make(patch, known, made);

  const TileCast& cast = task.results.cast;
  uint32_t row_maxima[kLaneVectors<T>][kPatchRows];
  float thread_amax = 0.0f;
#pragma unroll
  for (int v = 0; v < kLaneVectors<T>; ++v) {
    thread_amax = amax_of(thread_amax, by_tile::find_row_maxima(made[v], 0, row_maxima[v]));
    uint32_t* target = shared.column_maxima[threadIdx.x / kWarp] + patch.col_of(v) / Vector<T>::kPerWord;
    write_vector(reinterpret_cast<T*>(target), by_tile::find_column_maxima(made[v][0], 0));
  }
  const uint32_t shared_maxima = share_row_maxima<T>(row_maxima);
  // merge_amax contains a barrier. After it, all maxima are in shared memory.
  merge_amax<kThreads>(thread_amax, cast.amax);
  const int column = static_cast<int>(threadIdx.x);
  float amax = 0.0f;
  if (cast.values_t != nullptr) {
    if (column < kCols<T>) {
      amax = by_tile::column_amax<T>(shared.column_maxima, column);
      *in_block(shared.other_maxima + column, (1 - band) << log2_blocks | place.block) = amax;
    }
    arrive_at_cluster();
  }
  if (cast.values != nullptr) {
    find_row_scales(task, place, shared_maxima, shared);
    store_rows(task, place, patch, made, shared);
  }
  if (cast.values_t == nullptr) return;
  wait_for_cluster();
  if (column < kCols<T>) {
    // Both bands compute the same scale, and the upper one stores it.
    const bool writes = band == 0 && column < place.cols;
    shared.column_multipliers[column] =
        by_tile::keep_column_scale(task, fmaxf(amax, shared.other_maxima[column]), place.first_row,
                                   writes ? place.first_col + column : task.cols);
  }
  __syncthreads();
  store_columns(task, place, patch, made, shared, staged);
}

}  // namespace jax_fp8::norm_by_tile
