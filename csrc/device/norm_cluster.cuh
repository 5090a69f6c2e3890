// The norm of 32 rows by a cluster of up to 16 blocks, each with some of the columns.
//
// 32 rows give 32 bytes of each row of the transpose: a whole sector of memory.
//
//     16-bit: 32 KB of loads in flight per block, 4 blocks per multiprocessor,
//             so that some load while others compute or store;
//             24 KB of shared memory each, of which the transpose is 16 KB; 64 registers per thread, half of them x
//             [16384, 2048]: 512 clusters of 4 blocks, 3.9 times as many as 132 multiprocessors run at once
#pragma once

#include <cstdint>

#include "fp8.cuh"
#include "norm.cuh"
#include "norm_parts.cuh"
#include "reduce.cuh"
#include "scale_source.cuh"
#include "vector.cuh"

namespace jax_fp8::norm {

constexpr int kClusterRows = 32;
constexpr int kClusterThreads = 256;
constexpr int kClusterOccupancy = 4;  // blocks per multiprocessor, which the registers must allow
// Percent of a multiprocessor's L1 cache and shared memory that is shared memory for these blocks.
constexpr int kClusterCarveout = 55;
constexpr int kColumnWords = kClusterRows / kWarpRows;
static_assert(kClusterThreads / kWarp * kWarpRows == kClusterRows);

// Word w of a column has the four rows of warp w. Column c of the block has 8 words; word w is stored at (8 * c + w) ^
// (c / 8 % 32). At once, the 32 lanes of a warp write words that are 8 columns, or 64 words, apart: without the
// exclusive or they would all be in one bank, and with it they are in 32.
__device__ inline void put_columns(uint32_t* tile, int v, const uint32_t (&left)[4], const uint32_t (&right)[4]) {
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  uint32_t columns[2][4];
  transpose_bytes(left, columns[0]);
  transpose_bytes(right, columns[1]);
  uint32_t* words = tile + (v * kWarp + lane) * kVectorWidth * kColumnWords;
#pragma unroll
  for (int c = 0; c < kVectorWidth; ++c) words[(c * kColumnWords + warp) ^ lane] = columns[c / 4][c % 4];
}

// Two neighbouring threads store one column, 16 bytes each, and the block 128 columns at once.
template <typename T>
__device__ inline void store_columns(const uint32_t* tile, int cols, int64_t rows, int64_t first_row,
                                     uint8_t* values_t) {
  constexpr int kPassCols = kClusterThreads / 2, kPassGroups = kPassCols / kVectorWidth;
  const int first = static_cast<int>(threadIdx.x / 2), half = static_cast<int>(threadIdx.x % 2);
  const int word = (first * kColumnWords + half * 4) ^ (first / kVectorWidth);  // in the first pass
  const int64_t out_col = first_row + half * 16;
#pragma unroll
  for (int pass = 0; pass < kClusterCols<T> / kPassCols; ++pass) {
    const int column = first + pass * kPassCols;
    if (column >= cols || out_col >= rows) continue;
    const uint32_t* words = tile + pass * kPassCols * kColumnWords;
    const int at = word ^ (pass * kPassGroups % kWarp);
    const uint4 bytes = make_uint4(words[at], words[at ^ 1], words[at ^ 2], words[at ^ 3]);
    *reinterpret_cast<uint4*>(values_t + column * rows + out_col) = bytes;
  }
}

// Rows and cols are multiples of 16, cols at most kClusterCols << log2_blocks, pointers multiples of 16 bytes. kCasts:
// whether the caller needs the cast; else only amax and statistics.
template <typename T, Fp8Type kFormat, bool kCasts>
__global__ void __launch_bounds__(kClusterThreads, kClusterOccupancy)
    cluster_kernel(Rows<T> input, DeviceScaleSource scale, int log2_blocks, NormResults results) {
  __shared__ Known<T, kClusterRows, kMostParts> known;
  __shared__ uint32_t tile[kCasts ? kClusterCols<T> * kColumnWords : 1];
  const float loaded = kCasts ? __ldg(scale.element) : 0.0f;
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  const int cols = static_cast<int>(input.cols);
  const Place place = place_of(cols, kClusterRows, log2_blocks);
  const int64_t row = place.first_row + warp * kWarpRows;
  Patch<T> patch;
  find_statistics(input, place, 0, results.mean, results.rstd, patch, known);

  const float multiplier = kCasts ? multiplier_from<kFormat>(loaded, scale) : 0.0f;
  float thread_amax = 0.0f;
#pragma unroll
  for (int v = 0; v < kLaneVectors<T>; ++v) {
    if (!patch.holds(v)) continue;
    const int col = place.first_col + patch.col_of(v);
    float norm_scale[kVectorWidth], norm_bias[kVectorWidth];
    read_parameter<T>(known.parameters, 0, v * kWarp + lane, norm_scale);
    read_parameter<T>(known.parameters, 1, v * kWarp + lane, norm_bias);
    uint32_t left[kWarpRows], right[kWarpRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const Statistics of_row = known.statistics[warp * kWarpRows + r];
      float x[kVectorWidth];
      unpack(patch.rows[v][r], x);
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) {
        x[j] = normalized(x[j], of_row.mean, of_row.rstd, norm_scale[j], norm_bias[j]);
      }
      thread_amax = amax_of(thread_amax, x);
      if constexpr (kCasts) {
        round_all<T>(x);
        left[r] = quantize_four<kFormat>(x, multiplier);
        right[r] = quantize_four<kFormat>(x + 4, multiplier);
        if (results.values != nullptr) {
          *reinterpret_cast<uint2*>(results.values + (row + r) * cols + col) = make_uint2(left[r], right[r]);
        }
      }
    }
    if constexpr (kCasts) {
      if (results.values_t != nullptr) put_columns(tile, v, left, right);
    }
  }
  if constexpr (kCasts) {
    __syncthreads();
    if (results.values_t != nullptr) {
      store_columns<T>(tile, place.cols, input.rows, place.first_row, results.values_t + place.first_col * input.rows);
    }
  }
  // Rounding keeps the order, so the rounded maximum is the maximum of the rounded elements.
  merge_amax<kClusterThreads>(to_float(from_float<T>(thread_amax)), results.amax);
}

}  // namespace jax_fp8::norm
