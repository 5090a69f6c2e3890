// The cast and transpose of a matrix by tiles, each with a scale of its own. A producer makes the matrix. One read of
// its sources gives the FP8 values, their transpose, the scales of both, the amax and the column sums.
//
// A block has 128 rows and 128 columns, and so whole tiles of either orientation: it exchanges nothing with other
// blocks. The elements wait in registers, as the producer made them, while the maxima of rows and columns meet in
// shared memory and become scales. Then the kernel casts each element twice, with the scale of its row and with that of
// its column.
//
//     bfloat16 as it is: 32 KB of x in flight per block, 4 blocks per multiprocessor, so that some load while others
//                        compute; 64 registers per thread, half of them x
//     bfloat16, two inputs: only 2 blocks fit on a multiprocessor, too few for that. So a block has many tiles, and
//                        while it computes one, the 64 KB of the next arrive in shared memory.
//
// The producer is that of device/quantize_tile.cuh, with more members:
//
//     static constexpr int kTileBlocks;        // as kBlocks, for quantize_by_tile_kernel
//     address(input, row, col, width)          // the address of an element; only of producers with two 16-bit inputs,
//                                              // which must make zeros of zeros
//
// A companion has tiles of 1 x 128 along its columns.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "../launch.h"
#include "by_tile.cuh"
#include "column_sums.cuh"
#include "quantize_any_by_tile.cuh"
#include "quantize_tile.cuh"
#include "reduce.cuh"
#include "tile.cuh"
#include "tile_patches.cuh"
#include "tile_scales.cuh"
#include "vector.cuh"

namespace jax_fp8 {
namespace by_tile {

// ---- dynamic shared memory: the transpose of each part and of the companion, in halves; then the slots --------------

template <typename Producer>
constexpr bool kIs16Bit = sizeof(typename Producer::Element) == 2;

// Whether a block prefetches its next tile.
template <typename Producer>
constexpr bool kFetches = kIs16Bit<Producer> && Producer::kInputs == 2;

// Whether the companion waits for its scales in shared memory: with two parts there are not enough registers.
template <typename Producer>
constexpr bool kParks = kIs16Bit<Producer> && Producer::kParts == 2 && Producer::kCompanions == 1;

template <typename Producer>
constexpr int kStagedChunks = Shared<Producer>::kMade * kHalves * ValuesTile::kChunks;

template <typename Producer, bool kAhead>
constexpr int kSlots = (kAhead ? Producer::kInputs : kParks<Producer> ? 1 : 0) * kHalves * kPatchRows;

template <typename Producer, bool kAhead>
constexpr int kDynamicBytes =
    (kStagedChunks<Producer> + kSlots<Producer, kAhead> * kThreads) * static_cast<int>(sizeof(uint4));

// Percent of Hopper's 228 KB of shared memory on a multiprocessor for as many blocks as the registers allow. CUDA
// reserves 1 KB for each block.
template <typename Producer, bool kAhead>
constexpr int kCarveout = std::min<int>(
    100, 100 * Producer::kTileBlocks * (kDynamicBytes<Producer, kAhead> + sizeof(Shared<Producer>) + 2048) /
                 (228 * 1024) +
             1);

// ---- a tile of 128 rows x 128 columns -------------------------------------------------------------------------------
//
// Rows and width are multiples of 16 (width of 128 with two parts), and pointers of 16 bytes. Every thread of the block
// must call it.

// `next` is the tile after this one, which the block prefetches if kAhead. `staged` is the dynamic shared memory.
template <typename Producer, bool kAhead>
__device__ inline void quantize_tile_at(const Producer& producer, const Task& task, const Place& place,
                                        const Place& next, uint4* staged, Shared<Producer>& shared) {
  using T = typename Producer::Element;
  constexpr int kParts = Producer::kParts, kMade = Shared<Producer>::kMade, kInputs = Producer::kInputs;
  const ByTileResults& results = task.results;
  const int64_t rows = results.rows, width = results.width;
  const int group = threadIdx.x % kGroups, patch = threadIdx.x / kGroups, warp = threadIdx.x / kWarp;
  const Slots slots{staged + kStagedChunks<Producer>};

  Patches<T, kInputs> loaded;
  Patches<T, kMade> made;
  if constexpr (kAhead) {
    wait_for_fetched();
  } else {
    load_patches<kParks<Producer>>(producer, task, place, slots, loaded);
  }
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    if constexpr (kAhead) take_patch(slots, half, loaded[half]);
    if constexpr (kParks<Producer>) {
      if (half == 1) {
        put_column_maxima(made[0], kParts, 0, group, shared.column_maxima[kParts][warp]);
        wait_for_fetched();
        take_and_park(slots, loaded[1], made[0], kParts);
      }
    }
    if (kAhead || place.inside[half]) {
      producer.make(place.row(), place.col(half), loaded[half], made[half]);
    } else {
#pragma unroll
      for (int i = 0; i < kPatchRows * kMade; ++i) made[half][i / kMade][i % kMade] = filled_with<T>(0);
    }
    if constexpr (kAhead) fetch_patch(producer, task, next, half, slots);
  }
  if constexpr (kParks<Producer>) {
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) write_vector(slots.at<T>(parking_slot(1, r)), made[1][r][kParts]);
  }
  const float amax = put_maxima<Producer>(made, patch, group, shared);
#pragma unroll
  for (int half = kParks<Producer> ? 1 : 0; half < (Producer::kCompanions ? kHalves : 0); ++half) {
    put_column_maxima(made[half], kMade - 1, half, group, shared.column_maxima[kMade - 1][warp]);
  }
  // merge_amax contains a barrier. After it, all maxima are in shared memory.
  merge_amax<kThreads>(amax, results.cast.amax);
  find_scales(task, place.tile_row, place.tile_col, shared);
  __syncthreads();

  const TileCast& cast = results.cast;
  const bool straight = cast.values != nullptr;
  const bool apart = cast.values_t && !(straight && cast.rule.square && cast.rule.square_t);
  const auto staged_at = [&](int part, int half) { return staged + (part * kHalves + half) * ValuesTile::kChunks; };
  uint32_t left[kPatchRows], right[kPatchRows];
#pragma unroll
  for (int half = 0; half < (Producer::kCompanions ? kHalves : 0); ++half) {  // first, to free registers
    Vector<T> companion[kPatchRows];
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      if constexpr (kParks<Producer>) {
        companion[r] = read_vector(slots.at<T>(parking_slot(half, r)));
      } else {
        companion[r] = made[half][r][kMade - 1];
      }
    }
    const int in_tile = half * ValuesTile::kCols + Place::patch_col();
    cast_columns(companion, shared.column_multipliers[kMade - 1] + in_tile, left, right);
    quantize_tile::put_patch(staged_at(kMade - 1, half), patch, group, left, right);
  }
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int in_tile = half * ValuesTile::kCols + Place::patch_col();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const PatchCast patch_cast{
          .row_multipliers = shared.row_multipliers[part] + Place::patch_row(),
          .column_multipliers = shared.column_multipliers[part] + in_tile,
          .values = cast.values + (place.row() * kParts + part) * width + place.col(half),
          .stride = kParts * width,
          .inside = place.inside[half],
      };
      float sums[kVectorWidth] = {};
      if (straight && apart) {
        cast_patch<true, true>(made[half], part, patch_cast, left, right, sums);
      } else if (straight) {
        cast_patch<true, false>(made[half], part, patch_cast, left, right, sums);
      } else {
        cast_patch<false, true>(made[half], part, patch_cast, left, right, sums);
      }
      if (cast.values_t) quantize_tile::put_patch(staged_at(part, half), patch, group, left, right);
      if constexpr (Producer::kSums) quantize_tile::put_sums(shared.sums[part][half], group, sums);
    }
  }
  __syncthreads();

  if constexpr (Producer::kSums) store_sums(task, place.tile_row, place.tile_col, shared);
#pragma unroll
  for (int part = 0; part < kMade; ++part) {
    uint8_t* values_t = part == kParts ? results.companion.values_t
                        : cast.values_t ? cast.values_t + part * width * rows : nullptr;
#pragma unroll
    for (int half = 0; half < kHalves && values_t; ++half) {
      quantize_tile::store_transpose(staged_at(part, half), place.tile_row, place.tile_col + half * ValuesTile::kCols,
                                     rows, width, values_t);
    }
  }
}

}  // namespace by_tile

// One block for each tile; if kAhead, any number of blocks, which take turns at the tiles.
template <typename Producer, bool kAhead>
__global__ void __launch_bounds__(by_tile::kThreads, Producer::kTileBlocks)
    quantize_by_tile_kernel(Producer producer, by_tile::Task task) {
  using namespace by_tile;
  extern __shared__ uint4 staged[];
  __shared__ Shared<Producer> shared;
  Place place = place_of(task, blockIdx.x);
  if constexpr (kAhead) {
    const Slots slots{staged + kStagedChunks<Producer>};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) fetch_patch(producer, task, place, half, slots);
    for (unsigned tile = blockIdx.x; tile < task.tiles; tile += gridDim.x) {
      const Place next = place_of(task, tile + gridDim.x);
      quantize_tile_at<Producer, kAhead>(producer, task, place, next, staged, shared);
      place = next;
    }
  } else {
    quantize_tile_at<Producer, kAhead>(producer, task, place, place, staged, shared);
  }
}

// ---- launching ------------------------------------------------------------------------------------------------------

namespace by_tile {

template <typename Producer, bool kAhead>
cudaError_t launch_tiles(const Producer& producer, const Task& task, int multiprocessors, cudaStream_t stream) {
  const auto kernel = quantize_by_tile_kernel<Producer, kAhead>;
  constexpr int kBytes = kDynamicBytes<Producer, kAhead>;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, kCarveout<Producer, kAhead>);
  if (status != cudaSuccess) return status;
  const unsigned at_once = static_cast<unsigned>(multiprocessors * Producer::kTileBlocks);
  kernel<<<kAhead ? std::min(task.tiles, at_once) : task.tiles, kThreads, kBytes, stream>>>(producer, task);
  return cudaGetLastError();
}

template <typename Producer>
cudaError_t launch_tiles(const Producer& producer, const Task& task, cudaStream_t stream) {
  if constexpr (kFetches<Producer>) {
    int device = 0, multiprocessors = 0, most_shared = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return status;
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (status != cudaSuccess) return status;
    status = cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status != cudaSuccess) return status;
    constexpr int kWanted = kDynamicBytes<Producer, true> + static_cast<int>(sizeof(Shared<Producer>)) + 1024;
    if (most_shared >= kWanted) return launch_tiles<Producer, true>(producer, task, multiprocessors, stream);
  }
  return launch_tiles<Producer, false>(producer, task, 0, stream);
}

}  // namespace by_tile

// `aligned` says whether all pointers are multiples of 16 bytes. The amax must be initialized, to zero or to one that
// the result must include.
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
      .tiles = static_cast<unsigned>(divide_up(rows, kTile) * tiles_per_row),
  };
  if (task.tiles != 0 && vectorized) {
    const cudaError_t status = launch_tiles(producer, task, stream);
    if (status != cudaSuccess) return status;
  } else if (task.tiles != 0) {
    quantize_any_by_tile_kernel<Producer><<<task.tiles, kAnyThreads, 0, stream>>>(producer, task);
  }
  if (Producer::kSums && cols != 0) {
    launch_column_sums(results.sums, ColumnSums{}, divide_up(rows, kTile), cols, stream);
  }
  return cudaGetLastError();
}

}  // namespace jax_fp8
