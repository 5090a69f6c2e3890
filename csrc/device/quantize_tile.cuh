// The cast and transpose of a matrix with one scale; each block takes a tile of it. A producer makes the matrix. One
// read of its sources gives the FP8 values, their transpose, the amax and the column sums.
//
// A producer makes the elements of kParts matrices side by side from kInputs loads, already rounded to Element:
//
//     using Element = T;
//     static constexpr int kInputs, kParts;
//     static constexpr int kBlocks;            // per multiprocessor, which the registers of the tile kernel must allow
//     static constexpr bool kSums;             // whether the caller needs column sums
//     static constexpr int kCompanions;        // 1 if it also makes another matrix of `width` columns, else 0
//     load(row, col, width, loaded)            // a vector of each input
//     make(row, col, loaded, made)             // the vectors of a patch of rows: of each part, then of the companion
//     element(row, col, width, made)           // one element of each
//
// `width` is the number of columns of one part; with two parts the result has 2 * width. A companion is written
// transposed only, in a format and with a scale of its own. The amax and the sums leave it out.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "../launch.h"
#include "by_dtype.cuh"
#include "column_sums.cuh"
#include "fp8.cuh"
#include "reduce.cuh"
#include "scale_source.cuh"
#include "tile.cuh"
#include "vector.cuh"

namespace jax_fp8 {

struct Companion {
  const float* scale;
  Fp8Type format;
  uint8_t* values_t;  // [width, rows]
};

// Results that the caller does not need are null.
struct TiledResults {
  uint8_t* values;    // [rows, parts * width]
  uint8_t* values_t;  // [parts * width, rows]
  float* amax;        // initialized to zero
  ColumnSums sums;    // [parts * width], if the producer has kSums
  Companion companion;
  int64_t rows;
  int64_t width;
  unsigned tiles_per_row;
};

// ---- tiles of 128 rows x 64 columns: rows and width are multiples of 16, pointers of 16 bytes -----------------------
//
// Neighbouring threads access whole 32-byte sectors: 128 bytes or more of a source's row, 64 bytes of a row of values,
// and 128 bytes of a row of values_t. Loads and the stores of values_t are 16 bytes a thread, and those of values 8.

namespace quantize_tile {

constexpr int kThreads = 256;  // one patch of 4 rows x 8 columns each
constexpr int kWarps = kThreads / kWarp;
constexpr int kGroups = 8;
using ValuesTile = Tile<kVectorWidth, kGroups>;
constexpr int kRows = kTileRows;
constexpr int kCols = ValuesTile::kCols;
static_assert(kGroups * ValuesTile::kColumnWords == kThreads);
static_assert(kRows == kRowsPerPartialSum);

template <typename OfTile = ValuesTile>
__device__ inline void put_patch(uint4* tile, int patch, int group, const uint32_t (&left)[kPatchRows],
                                 const uint32_t (&right)[kPatchRows]) {
  uint32_t columns[2][4];
  transpose_bytes(left, columns[0]);
  transpose_bytes(right, columns[1]);
  OfTile::put(tile, patch, group, columns);
}

__device__ inline void store_transpose(const uint4* tile, int64_t tile_row, int64_t tile_col, int64_t rows,
                                       int64_t width, uint8_t* values_t) {
  ValuesTile::store<kThreads>(tile, tile_row, tile_col, rows, width, values_t);
}

// Adds up the four patches that a warp has in each group of columns, and stores the result in the warp's row of `sums`,
// which is aligned to 8 bytes. Every thread of the warp must call it.
__device__ inline void put_sums(float (*sums)[kCols], int group, const float (&patch_sums)[kVectorWidth]) {
  float of_two[kVectorWidth / 2], of_four[kVectorWidth / 4];
  share_sums(patch_sums, of_two, kGroups);
  share_sums(of_two, of_four, 2 * kGroups);
  const int lane = threadIdx.x % kWarp;
  const int column = group * kVectorWidth + (lane & kGroups ? 4 : 0) + (lane & 2 * kGroups ? 2 : 0);
  *reinterpret_cast<float2*>(&sums[threadIdx.x / kWarp][column]) = {of_four[0], of_four[1]};
}

}  // namespace quantize_tile

template <Fp8Type kFormat, typename Producer>
__global__ void __launch_bounds__(quantize_tile::kThreads, Producer::kBlocks)
    quantize_tile_kernel(Producer producer, DeviceScaleSource scale, TiledResults results) {
  using namespace quantize_tile;
  using T = typename Producer::Element;
  constexpr int kParts = Producer::kParts, kMade = kParts + Producer::kCompanions;
  __shared__ uint4 tile[kMade][ValuesTile::kChunks];
  __shared__ alignas(8) float sums[Producer::kSums ? kParts : 1][Producer::kSums ? kWarps : 1][kCols];
  const float loaded_scale = __ldg(scale.element);
  const float companion_scale = Producer::kCompanions ? __ldg(results.companion.scale) : 1.0f;
  const int64_t rows = results.rows, width = results.width;
  const int64_t tile_row = int64_t{blockIdx.x / results.tiles_per_row} * kRows;
  const int64_t tile_col = int64_t{blockIdx.x % results.tiles_per_row} * kCols;

  const int group = threadIdx.x % kGroups;
  const int patch = threadIdx.x / kGroups;
  const int64_t row = tile_row + patch * kPatchRows;
  const int64_t col = tile_col + group * kVectorWidth;
  float thread_amax = 0.0f;
  float patch_sums[kParts][kVectorWidth] = {};
  if (row < rows && col < width) {
    Vector<T> loaded[kPatchRows][Producer::kInputs], made[kPatchRows][kMade];
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) producer.load(row + r, col, width, loaded[r]);
    const float multiplier = multiplier_from<kFormat>(loaded_scale, scale);
    producer.make(row, col, loaded, made);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint32_t left[kPatchRows], right[kPatchRows];
#pragma unroll
      for (int r = 0; r < kPatchRows; ++r) {
        float elements[kVectorWidth];
        unpack(made[r][part], elements);
        thread_amax = amax_of(thread_amax, elements);
        left[r] = quantize_four<kFormat>(elements, multiplier);
        right[r] = quantize_four<kFormat>(elements + 4, multiplier);
        if constexpr (Producer::kSums) {
#pragma unroll
          for (int c = 0; c < kVectorWidth; ++c) patch_sums[part][c] += elements[c];
        }
      }
      if (results.values) {
        uint8_t* target = results.values + (row * kParts + part) * width + col;
#pragma unroll
        for (int r = 0; r < kPatchRows; ++r) {
          *reinterpret_cast<uint2*>(target + r * kParts * width) = {left[r], right[r]};
        }
      }
      if (results.values_t) put_patch(tile[part], patch, group, left, right);
    }
    if constexpr (Producer::kCompanions) {
      const float companion_multiplier = multiplier_of(companion_scale);
      with_format(results.companion.format, [&](auto format) {
        uint32_t left[kPatchRows], right[kPatchRows];
#pragma unroll
        for (int r = 0; r < kPatchRows; ++r) {
          float elements[kVectorWidth];
          unpack(made[r][kParts], elements);
          left[r] = quantize_four<decltype(format)::value>(elements, companion_multiplier);
          right[r] = quantize_four<decltype(format)::value>(elements + 4, companion_multiplier);
        }
        put_patch(tile[kParts], patch, group, left, right);
      });
    }
  }
  if constexpr (Producer::kSums) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) put_sums(sums[part], group, patch_sums[part]);
  }
  __syncthreads();

#pragma unroll
  for (int part = 0; part < kParts && results.values_t; ++part) {
    store_transpose(tile[part], tile_row, tile_col, rows, width, results.values_t + part * width * rows);
  }
  if constexpr (Producer::kCompanions) {
    store_transpose(tile[kParts], tile_row, tile_col, rows, width, results.companion.values_t);
  }
  if constexpr (Producer::kSums) {
    const int part = threadIdx.x / kCols, column = threadIdx.x % kCols;
    if (part < kParts && tile_col + column < width) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sum += sums[part][warp][column];
      results.sums.partial[(tile_row / kRows * kParts + part) * width + tile_col + column] = sum;
    }
  }
  merge_amax<kThreads>(thread_amax, results.amax);
}

// ---- tiles of 128 rows x 32 columns, one element at a time: any shape -----------------------------------------------

namespace quantize_tile {

constexpr int kAnyCols = 32;
constexpr int kAnyRowsAtOnce = kThreads / kAnyCols;  // one per warp

}  // namespace quantize_tile

template <Fp8Type kFormat, typename Producer>
__global__ void __launch_bounds__(quantize_tile::kThreads)
    quantize_any_kernel(Producer producer, DeviceScaleSource scale, TiledResults results) {
  using namespace quantize_tile;
  constexpr int kParts = Producer::kParts, kMade = kParts + Producer::kCompanions;
  __shared__ uint8_t tile[kMade][kRows][kAnyCols + 4];  // the padding of 4 bytes shifts each row by one bank
  __shared__ float sums[Producer::kSums ? kParts : 1][Producer::kSums ? kAnyRowsAtOnce : 1][kAnyCols];
  const float multiplier = multiplier_from<kFormat>(__ldg(scale.element), scale);
  const float companion_multiplier = Producer::kCompanions ? multiplier_of(__ldg(results.companion.scale)) : 1.0f;
  const int64_t rows = results.rows, width = results.width;
  const int64_t tile_row = int64_t{blockIdx.x / results.tiles_per_row} * kRows;
  const int64_t tile_col = int64_t{blockIdx.x % results.tiles_per_row} * kAnyCols;
  const int lane = threadIdx.x % kAnyCols;
  const int warp = threadIdx.x / kAnyCols;
  const int64_t col = tile_col + lane;
  float thread_amax = 0.0f;
  float thread_sums[kParts] = {};
  for (int r = warp; r < kRows && tile_row + r < rows && col < width; r += kAnyRowsAtOnce) {
    float elements[kMade];
    producer.element(tile_row + r, col, width, elements);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint8_t value = quantize_one<kFormat>(elements[part], multiplier);
      thread_amax = amax_of(thread_amax, elements[part]);
      thread_sums[part] += elements[part];
      tile[part][r][lane] = value;
      if (results.values) results.values[((tile_row + r) * kParts + part) * width + col] = value;
    }
    if constexpr (Producer::kCompanions) {
      with_format(results.companion.format, [&](auto format) {
        tile[kParts][r][lane] = quantize_one<decltype(format)::value>(elements[kParts], companion_multiplier);
      });
    }
  }
  if constexpr (Producer::kSums) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) sums[part][warp][lane] = thread_sums[part];
  }
  __syncthreads();

  const auto store = [&](const auto& values, uint8_t* values_t) {
    for (int item = threadIdx.x; item < kAnyCols * kRows; item += kThreads) {
      const int c = item / kRows, r = item % kRows;
      const int64_t out_row = tile_col + c, out_col = tile_row + r;
      if (out_row < width && out_col < rows) values_t[out_row * rows + out_col] = values[r][c];
    }
  };
#pragma unroll
  for (int part = 0; part < kParts && results.values_t; ++part) {
    store(tile[part], results.values_t + part * width * rows);
  }
  if constexpr (Producer::kCompanions) store(tile[kParts], results.companion.values_t);
  if constexpr (Producer::kSums) {
    if (warp < kParts && col < width && tile_row < rows) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kAnyRowsAtOnce; ++w) sum += sums[warp][w][lane];
      results.sums.partial[(tile_row / kRows * kParts + warp) * width + col] = sum;
    }
  }
  merge_amax<kThreads>(thread_amax, results.amax);
}

// ---- launching ------------------------------------------------------------------------------------------------------

// `aligned` says whether all pointers are multiples of 16 bytes.
template <Fp8Type kFormat, typename Producer>
void launch_quantize_tiles(const Producer& producer, const DeviceScaleSource& scale, TiledResults results, bool aligned,
                           cudaStream_t stream) {
  using namespace quantize_tile;
  const bool vectorized =
      aligned && results.rows % 16 == 0 && results.width % 16 == 0 && results.rows * results.width != 0;
  const auto kernel = vectorized ? quantize_tile_kernel<kFormat, Producer> : quantize_any_kernel<kFormat, Producer>;
  // An empty matrix has a scale too: one block runs and writes it.
  const int64_t tiles_per_column = std::max<int64_t>(1, divide_up(results.rows, kRows));
  const int64_t tiles_per_row = std::max<int64_t>(1, divide_up(results.width, vectorized ? kCols : kAnyCols));
  results.tiles_per_row = static_cast<unsigned>(tiles_per_row);
  kernel<<<static_cast<unsigned>(tiles_per_column * tiles_per_row), kThreads, 0, stream>>>(producer, scale, results);
  const int64_t cols = Producer::kParts * results.width;
  if (Producer::kSums && cols != 0) {
    launch_column_sums(results.sums, ColumnSums{}, divide_up(results.rows, kRows), cols, stream);
  }
}

}  // namespace jax_fp8
