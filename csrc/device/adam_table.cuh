// Which leaves a launch of Adam updates, which elements of them a thread has, and what the compiler knows of how they
// are kept.
//
// Chunks of 16384 elements: flat where the shape does not matter, tiles of 128 x 128 where a transpose is written.
#pragma once

#include <cstdint>

#include "adam.cuh"
#include "reduce.cuh"
#include "tile.cuh"

namespace jax_fp8 {

// A warp has a row of a tile, four neighbours a thread: then every access of a warp is of whole 128-byte lines, be the
// elements 4 bytes each or 1. A tile is four rounds of 8 x 32 patches, one per thread.
constexpr int kTileThreads = 256;
constexpr int kTileWidth = 4;
constexpr int kGroups = 32;
using LeafTile = Tile<kTileWidth, kGroups>;
constexpr int kTileCols = LeafTile::kCols;
constexpr int kRoundPatches = kTileThreads / kGroups;
constexpr int kRoundRows = kRoundPatches * kPatchRows;
constexpr int kVectors = kTileRows / kRoundPatches;  // of four neighbours, per thread
constexpr int kChunk = kTileThreads * kTileWidth * kVectors;
static_assert(kTileRows * kTileCols == kChunk, "a chunk is a tile, or as many elements in a row");

// ---- the table: in the parameters of a kernel -----------------------------------------------------------------------

constexpr int kParameterBytes = 32764;

template <int kLeaves>
struct LeafTable {
  uint32_t first_block[kLeaves];  // ascending
  int number[kLeaves];            // of the leaf within the whole call
  AdamLeaf leaves[kLeaves];
  int leaf_count;
  int first_leaf;
  bool adam_w_mode;
  const float* scalars;
  const float* scales;
  const uint32_t* seed;
  const uint32_t* places;
};

template <int kLeaves>
__device__ inline int slot_of(const LeafTable<kLeaves>& table, uint32_t block) {
  int low = 0, high = table.leaf_count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (table.first_block[middle] <= block ? low : high) = middle;
  }
  return low;
}

template <int kLeaves>
__device__ inline Step step_of(const LeafTable<kLeaves>& table, int slot) {
  const int number = table.number[slot];
  Step step = step_of(table.scalars, table.scales + number * kAdamScales);
  step.drawing = drawing_of(table.places, number, __ldg(table.seed), table.first_leaf + number);
  step.couples_decay = !table.adam_w_mode;
  return step;
}

// ---- the elements of a thread ---------------------------------------------------------------------------------------

// Which elements a thread updates: vector v starts at first + v / 4 * round_stride + v % 4 * stride,
// if it ends before `end`.
struct Walk {
  int64_t first, round_stride, stride, end;

  __device__ int64_t at(int vector) const {
    return first + vector / kPatchRows * round_stride + vector % kPatchRows * stride;
  }
};

__device__ inline Walk flat_walk(const AdamLeaf& leaf, uint32_t chunk) {
  const int64_t stride = kTileThreads * kTileWidth;
  return {chunk * int64_t{kChunk} + threadIdx.x * kTileWidth, stride * kPatchRows, stride, leaf.rows * leaf.cols};
}

__device__ inline Walk tile_walk(const AdamLeaf& leaf, int64_t tile_row, int64_t tile_col) {
  const int64_t row = tile_row + threadIdx.x / kGroups * kPatchRows;
  const int64_t col = tile_col + threadIdx.x % kGroups * kTileWidth;
  return {row * leaf.cols + col, kRoundRows * leaf.cols, leaf.cols, col < leaf.cols ? leaf.rows * leaf.cols : 0};
}

// Loads kCount vectors, of which those that are not there stay as they are.
template <int kCount>
__device__ inline void load_vectors(const AdamLeaf& leaf, const Walk& walk, int64_t first,
                                    Words<kTileWidth> (&words)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (first + i * walk.stride + kTileWidth <= walk.end) load(leaf, first + i * walk.stride, words[i]);
  }
}

__device__ inline void put_patch(uint4* tile, int round, const uint32_t (&rows)[kPatchRows]) {
  uint32_t columns[1][kTileWidth];
  transpose_bytes(rows, columns[0]);
  LeafTile::put(tile, threadIdx.x / kGroups + round * kRoundPatches, threadIdx.x % kGroups, columns);
}

// A patch of the rowwise values in a shared cast, whose rows are longer than those of the leaf.
__device__ inline void store_patch(const AdamLeaf& leaf, int64_t tile_row, int64_t tile_col, int round,
                                   const uint32_t (&rows)[kPatchRows]) {
  const int64_t row = tile_row + round * kRoundRows + threadIdx.x / kGroups * kPatchRows;
  const int64_t col = tile_col + threadIdx.x % kGroups * kTileWidth;
  if (row >= leaf.rows || col >= leaf.cols) return;
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    store_words(leaf.values, (row + i) * leaf.values_stride + col, kTileWidth, rows + i);
  }
}

// ---- what is known of the leaves of a kernel ------------------------------------------------------------------------

// How the leaves of a kernel are kept. What is known to the compiler costs no instruction; a kernel that takes every
// leaf decides at run time, the same way for a whole block, in code that is several times as long. kInFlight vectors
// are loaded by a thread before it needs the first; kBlocks are resident on a multiprocessor, and kSquareBlocks of
// those that cast by tile.
template <Storage kG, Storage kMoments, Storage kParam, Storage kMaster>
struct Known {
  static bool takes(const AdamLeaf& leaf) {
    return leaf.g_storage == kG && leaf.mu_storage == kMoments && leaf.nu_storage == kMoments &&
           leaf.param_storage == kParam && leaf.master_storage == kMaster;
  }
  static __device__ void tell(AdamLeaf& leaf) {
    leaf.g_storage = kG, leaf.mu_storage = leaf.nu_storage = kMoments;
    leaf.param_storage = kParam, leaf.master_storage = kMaster;
  }
  static constexpr bool kMayHaveParam = kParam != Storage::kNone;
  // FP8 moments are mostly arithmetic, and want more warps. The others want long runs of loads between runs of stores,
  // for memory that turns around less often: measured, 9.3 instead of 9.5 ms for 1.3 billion params.
  static constexpr int kInFlight = is_fp8(kMoments) ? 2 : 4;
  // Nothing of these kernels may be spilled: ptxas of CUDA 13.0 was seen to take what a thread had put on its stack for
  // a value that all threads of a warp share. So those with the most to keep have fewer blocks and more registers.
  static constexpr bool kHasBoth = kParam != Storage::kNone && kMaster == Storage::kFloat32;
  static constexpr bool kKeepsMuch = kG == Storage::kFloat32 && kHasBoth;
  static constexpr int kBlocks = is_fp8(kMoments) ? (kKeepsMuch ? 3 : 4) : 2;
  static constexpr int kSquareBlocks = is_fp8(kMoments) ? 3 : 2;
};

struct Unknown {
  static bool takes(const AdamLeaf&) { return true; }
  static __device__ void tell(AdamLeaf&) {}
  static constexpr bool kMayHaveParam = true;
  static constexpr int kInFlight = 1;
  static constexpr int kBlocks = 3;
  static constexpr int kSquareBlocks = 3;
};

}  // namespace jax_fp8
