// The table of the leaves that a launch of Adam updates, the elements of a leaf that a thread has, and the dtypes that
// a kernel knows at compile time.
//
// A block updates a chunk of 16384 elements: contiguous ones where the shape does not matter, and a tile of 128 x 128
// where the kernel writes a transpose.
#pragma once

#include <cstdint>

#include "adam.cuh"
#include "reduce.cuh"
#include "tile.cuh"

namespace jax_fp8 {

// A warp has a row of a tile, and each thread four neighbours of it. So every access of a warp covers whole 128-byte
// lines, whether elements have 4 bytes or 1. A tile is four rounds of 8 x 32 patches, and each thread has one patch of
// a round.
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

constexpr int kParameterBytes = 32764;  // the most that CUDA passes to a kernel

template <int kLeaves>
struct LeafTable {
  uint32_t first_block[kLeaves];  // of the grid; ascending, so that a block finds its leaf by bisection
  int number[kLeaves];            // of the leaf in the whole call
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

// The elements that a thread updates: vector v starts at first + v / 4 * round_stride + v % 4 * stride, and is skipped
// if it would end past `end`.
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

// Loads kCount vectors; words of a vector past the end stay as they are.
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

// Stores a patch of rowwise values in a shared cast, whose rows are longer than those of the leaf.
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

// ---- the dtypes that a kernel knows at compile time -----------------------------------------------------------------

// The storage of the leaves of a kernel. A branch on a storage that the compiler knows costs no instruction. A kernel
// that takes every leaf branches at run time, in the same way for a whole block, and its code is several times as long.
//
// A thread loads kInFlight vectors before it needs the first. kBlocks blocks share a multiprocessor, and kSquareBlocks
// where the kernel casts by tile.
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
  // FP8 moments need much arithmetic, and so more warps. The others need long runs of loads between runs of stores,
  // since memory loses time when it turns from reads to writes: measured, 9.3 instead of 9.5 ms for 1.3 billion params.
  static constexpr int kInFlight = is_fp8(kMoments) ? 2 : 4;
  // These kernels must not spill registers: ptxas of CUDA 13.0 was seen to treat what a thread had spilled to its stack
  // as a value that all threads of its warp share. So the kernels that hold the most have fewer blocks and more
  // registers.
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
