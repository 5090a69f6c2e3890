// Adam for leaves that are cast by tile, with a scale for each square of 128 x 128.
//
// A scale follows from the new weights of its square. A block has all of them, so it exchanges nothing with other
// blocks. The weights wait in shared memory until their maximum has become the scale; a thread reads back only what it
// wrote. In registers they would take 64 of a thread's 128, which the loads in flight need.
//
//     float32 params, moments and gradients: 16 bytes read and 14 written for each param; a cast of its own behind the
//                                            step reads 4 again
//     a block: 64 KB of weights, in whose place the transpose of their FP8 values is made; 2 or 3 on a multiprocessor
#pragma once

#include <cstdint>

#include "adam_table.cuh"
#include "fp8.cuh"
#include "reduce.cuh"

namespace jax_fp8 {

constexpr int kSquareTableLeaves = 270;

struct SquareTable {
  LeafTable<kSquareTableLeaves> of_leaves;
  AdamSquares squares[kSquareTableLeaves];
  AmaxRule rule;
};
static_assert(sizeof(SquareTable) <= kParameterBytes, "the leaves of a launch travel in its parameters");

constexpr int kStagedBytes = kChunk * sizeof(float);
static_assert(sizeof(uint4) == kTileWidth * sizeof(float) && LeafTile::kChunks * sizeof(uint4) <= kStagedBytes);

// Percent of Hopper's 228 KB of shared memory on a multiprocessor that these blocks share. CUDA reserves 1 KB for each
// block.
template <typename Kind>
constexpr int kSquareCarveout = 100 * Kind::kSquareBlocks * (kStagedBytes + 2048) / (228 * 1024) + 1;

// The largest x of each warp; no x is NaN. Readers of `warp_maxima` need a barrier after this.
__device__ inline void put_maximum(float x, uint32_t (&warp_maxima)[kTileThreads / kWarp]) {
  const uint32_t bits = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(x));
  if (threadIdx.x % kWarp == 0) warp_maxima[threadIdx.x / kWarp] = bits;
}

__device__ inline float maximum_of(const uint32_t (&warp_maxima)[kTileThreads / kWarp]) {
  uint32_t bits = 0;
#pragma unroll
  for (int warp = 0; warp < kTileThreads / kWarp; ++warp) bits = max(bits, warp_maxima[warp]);
  return __uint_as_float(bits);
}

template <typename Kind>
__global__ void __launch_bounds__(kTileThreads, Kind::kSquareBlocks)
    adam_by_tile_kernel(const __grid_constant__ SquareTable table) {
  extern __shared__ uint4 staged[];
  __shared__ uint32_t warp_maxima[kTileThreads / kWarp];
  const int slot = slot_of(table.of_leaves, blockIdx.x);
  const Step step = step_of(table.of_leaves, slot);
  if (step.scalars[kApply] == 0.0f) return;
  AdamLeaf leaf = table.of_leaves.leaves[slot];
  Kind::tell(leaf);

  const uint32_t chunk = blockIdx.x - table.of_leaves.first_block[slot];
  const auto squares_per_row = static_cast<uint32_t>((leaf.cols + kTileCols - 1) / kTileCols);
  const int square_row = static_cast<int>(chunk / squares_per_row);
  const int square_col = static_cast<int>(chunk % squares_per_row);
  const int64_t tile_row = int64_t{square_row} * kTileRows, tile_col = int64_t{square_col} * kTileCols;
  const Walk walk = tile_walk(leaf, tile_row, tile_col);
  uint4* const own = staged + threadIdx.x;  // vector v is at own[v * kTileThreads], so a warp meets all banks evenly
  float amax = 0.0f, largest = 0.0f;        // for the leaf, NaN if an element is; for the square's scale, without NaN

  constexpr int kCount = Kind::kInFlight;
#pragma unroll 1
  for (int vector = 0; vector < kVectors; vector += kCount) {  // not unrolled: the instruction cache is small
    const int64_t first = walk.at(vector);
    Words<kTileWidth> words[kCount];
    load_vectors(leaf, walk, first, words);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (first + i * walk.stride + kTileWidth > walk.end) continue;
      float p[kTileWidth];
      renew(leaf, step, first + i * walk.stride, words[i], p);
      own[(vector + i) * kTileThreads] = make_uint4(__float_as_uint(p[0]), __float_as_uint(p[1]),
                                                    __float_as_uint(p[2]), __float_as_uint(p[3]));
      amax = amax_of(amax, p);
#pragma unroll
      for (int c = 0; c < kTileWidth; ++c) largest = fmaxf(largest, fabsf(p[c]));
    }
  }
  put_maximum(largest, warp_maxima);
  merge_amax<kTileThreads>(amax, leaf.amax);  // contains a barrier

  const float scale = scale_from_amax<Fp8Type::kE4M3>(maximum_of(warp_maxima), table.rule);
  const float multiplier = multiplier_of(scale);
  if (threadIdx.x == 0) {
    const AdamSquares& squares = table.squares[slot];
    squares.scales[int64_t{square_row} * squares.scales_stride + square_col] = scale;
    squares.scales_t[int64_t{square_col} * squares.scales_t_stride + square_row] = scale;
  }
  constexpr int kRounds = kVectors / kPatchRows;
  uint32_t rows[kRounds][kPatchRows];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (walk.at(round * kPatchRows) + kTileWidth > walk.end) continue;  // a patch lies inside the leaf or outside
#pragma unroll
    for (int i = 0; i < kPatchRows; ++i) {
      const uint4 p = own[(round * kPatchRows + i) * kTileThreads];
      const float four[] = {__uint_as_float(p.x), __uint_as_float(p.y), __uint_as_float(p.z), __uint_as_float(p.w)};
      rows[round][i] = quantize_four<Fp8Type::kE4M3>(four, multiplier);
    }
    store_patch(leaf, tile_row, tile_col, round, rows[round]);
  }
  __syncthreads();  // what was staged has been read
#pragma unroll
  for (int round = 0; round < kRounds; ++round) put_patch(staged, round, rows[round]);
  __syncthreads();
  LeafTile::store<kTileThreads, CachePolicy::kTouchedOnce>(staged, tile_row, tile_col, leaf.rows, leaf.cols,
                                                           leaf.values_t);
}

}  // namespace jax_fp8
