// The cast and transpose of a matrix in which every tile has a scale of its own, from whatever makes the matrix: one
// read of its sources writes the FP8 values, their transpose, the scales of both, the amax and the sums of the columns.
//
// A block has 128 rows and columns, and so whole tiles of either orientation: it need not ask anybody. Its elements
// wait in registers, as they were made, while the maxima of rows and columns meet in shared memory and become scales.
// Then each is cast twice, with the scale of its row and with that of its column.
//
//     bfloat16 as it is: 32 KB of x in flight per block, 4 blocks per multiprocessor, whose phases have nothing to do
//                        with one another; 64 registers per thread, half of them x
//
// The matrix comes from a producer, as device/quantize_tile.cuh has it, with one constant more:
//
//     static constexpr int kTileBlocks;        // as kBlocks, for quantize_by_tile_kernel
//
// A companion has tiles of 1 x 128 along its columns.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "../launch.h"
#include "by_tile.cuh"
#include "column_sums.cuh"
#include "fp8.cuh"
#include "quantize_any_by_tile.cuh"
#include "quantize_tile.cuh"
#include "reduce.cuh"
#include "tile.cuh"
#include "tile_scales.cuh"
#include "vector.cuh"

namespace jax_fp8 {
namespace by_tile {

// ---- casts ----------------------------------------------------------------------------------------------------------

// A patch, each row by its multiplier, of which the first is at `multipliers` in shared memory.
template <typename T, int kMade>
__device__ inline void cast_rows(const Vector<T> (&made)[kPatchRows][kMade], int part, const float* multipliers,
                                 uint32_t (&left)[kPatchRows], uint32_t (&right)[kPatchRows]) {
  float by_row[kPatchRows];
  read_fours(multipliers, by_row);
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
    float elements[kVectorWidth];
    unpack(made[r][part], elements);
    left[r] = quantize_four<kFormat>(elements, by_row[r]);
    right[r] = quantize_four<kFormat>(elements + 4, by_row[r]);
  }
}

// And each column by its.
template <typename T, int kMade>
__device__ inline void cast_columns(const Vector<T> (&made)[kPatchRows][kMade], int part, const float* multipliers,
                                    uint32_t (&left)[kPatchRows], uint32_t (&right)[kPatchRows]) {
  float by_column[kVectorWidth];
  read_fours(multipliers, by_column);
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
    float elements[kVectorWidth];
    unpack(made[r][part], elements);
    left[r] = quantize_four<kFormat>(elements, by_column);
    right[r] = quantize_four<kFormat>(elements + 4, by_column + 4);
  }
}

template <typename Producer>
constexpr int kStagedBytes = Shared<Producer>::kMade * kHalves * ValuesTile::kChunks * static_cast<int>(sizeof(uint4));

// Percent of a multiprocessor's 228 KB that as many blocks as registers allow share; a block takes 1 KB beside its own.
template <typename Producer>
constexpr int kCarveout = std::min<int>(
    100, 100 * Producer::kTileBlocks * (kStagedBytes<Producer> + sizeof(Shared<Producer>) + 2048) / (228 * 1024) + 1);

}  // namespace by_tile

// ---- tiles of 128 rows x 128 columns --------------------------------------------------------------------------------
//
// Rows and width are multiples of 16, width of 128 where there are two parts, pointers of 16 bytes. Dynamic shared
// memory: the transpose of each part and of the companion, half by half.

template <typename Producer>
__global__ void __launch_bounds__(by_tile::kThreads, Producer::kTileBlocks)
    quantize_by_tile_kernel(Producer producer, by_tile::Task task) {
  using namespace by_tile;
  using T = typename Producer::Element;
  constexpr int kParts = Producer::kParts, kMade = Shared<Producer>::kMade;
  extern __shared__ uint4 staged[];
  __shared__ Shared<Producer> shared;
  const ByTileResults& results = task.results;
  const int64_t rows = results.rows, width = results.width;
  const int64_t tile_row = int64_t{blockIdx.x / task.tiles_per_row} * kTile;
  const int64_t tile_col = int64_t{blockIdx.x % task.tiles_per_row} * kTile;
  const int group = threadIdx.x % kGroups, patch = threadIdx.x / kGroups;
  const int64_t row = tile_row + patch * kPatchRows, col = tile_col + group * kVectorWidth;
  const auto is_inside = [&](int half) { return row < rows && col + half * ValuesTile::kCols < width; };

  Patches<T, Producer::kInputs> loaded;
  Patches<T, kMade> made;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    if (!is_inside(half)) continue;
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) producer.load(row + r, col + half * ValuesTile::kCols, width, loaded[half][r]);
  }
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    if (is_inside(half)) {
      producer.make(row, col + half * ValuesTile::kCols, loaded[half], made[half]);
    } else {
#pragma unroll
      for (int i = 0; i < kPatchRows * kMade; ++i) made[half][i / kMade][i % kMade] = filled_with<T>(0);
    }
  }
  // A barrier is in the merging: behind it all maxima are there.
  merge_amax<kThreads>(put_maxima<Producer>(made, patch, group, shared), results.cast.amax);
  find_scales(task, tile_row, tile_col, shared);
  if constexpr (Producer::kSums) store_sums(task, tile_row, tile_col, shared);
  __syncthreads();

  const TileCast& cast = results.cast;
  const bool is_cast_already = cast.values && cast.rule.square && cast.rule.square_t;
  const auto staged_at = [&](int part, int half) { return staged + (part * kHalves + half) * ValuesTile::kChunks; };
#pragma unroll
  for (int part = 0; part < kMade; ++part) {
    const bool is_companion = part == kParts;
    const bool straight = !is_companion && cast.values != nullptr, transposed = is_companion || cast.values_t;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (!is_inside(half)) continue;
      const int in_tile = half * ValuesTile::kCols + group * kVectorWidth;
      uint32_t left[kPatchRows], right[kPatchRows];
      if (straight) {
        cast_rows(made[half], part, shared.row_multipliers[is_companion ? 0 : part] + patch * kPatchRows, left, right);
        uint8_t* target = cast.values + (row * kParts + part) * width + tile_col + in_tile;
#pragma unroll
        for (int r = 0; r < kPatchRows; ++r) {
          *reinterpret_cast<uint2*>(target + r * kParts * width) = {left[r], right[r]};
        }
      }
      if (!transposed) continue;
      if (is_companion || !is_cast_already) {
        cast_columns(made[half], part, shared.column_multipliers[part] + in_tile, left, right);
      }
      quantize_tile::put_patch(staged_at(part, half), patch, group, left, right);
    }
  }
  __syncthreads();

#pragma unroll
  for (int part = 0; part < kMade; ++part) {
    uint8_t* values_t = part == kParts ? results.companion.values_t
                        : cast.values_t ? cast.values_t + part * width * rows : nullptr;
#pragma unroll
    for (int half = 0; half < kHalves && values_t; ++half) {
      quantize_tile::store_transpose(staged_at(part, half), tile_row, tile_col + half * ValuesTile::kCols, rows, width,
                                     values_t);
    }
  }
}

// ---- launching ------------------------------------------------------------------------------------------------------

// `aligned`: all pointers are. The amax is zero to start with, or one that counts as well.
template <typename Producer>
cudaError_t launch_by_tile(const Producer& producer, const ByTileResults& results, bool aligned,
                           cudaStream_t stream) {
  using namespace by_tile;
  const int64_t rows = results.rows, width = results.width, cols = Producer::kParts * width;
  const bool vectorized =
      aligned && rows % 16 == 0 && width % 16 == 0 && (Producer::kParts == 1 || width % kTile == 0);
  const int64_t tiles_per_row = divide_up(vectorized ? width : cols, kTile);
  const Task task{
      .results = results,
      .rule = amax_rule_of(results.cast.rule),
      .cols = cols,
      .tiles_per_row = static_cast<unsigned>(tiles_per_row),
  };
  const auto blocks = static_cast<unsigned>(divide_up(rows, kTile) * tiles_per_row);
  if (blocks != 0 && vectorized) {
    const auto kernel = quantize_by_tile_kernel<Producer>;
    constexpr int kBytes = kStagedBytes<Producer>;
    cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (status != cudaSuccess) return status;
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, kCarveout<Producer>);
    if (status != cudaSuccess) return status;
    kernel<<<blocks, kThreads, kBytes, stream>>>(producer, task);
  } else if (blocks != 0) {
    quantize_any_by_tile_kernel<Producer><<<blocks, kAnyThreads, 0, stream>>>(producer, task);
  }
  if (Producer::kSums && cols != 0) {
    launch_column_sums(results.sums, ColumnSums{}, divide_up(rows, kTile), cols, stream);
  }
  return cudaGetLastError();
}

}  // namespace jax_fp8
