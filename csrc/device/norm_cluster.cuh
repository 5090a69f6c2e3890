// The norm of rows whose columns a cluster of blocks shares: 32 rows, up to 16 blocks side by side.
//
// A block has 32 rows of 512 columns (256 of float32), a warp four of these rows, and x never leaves the warp's registers: all
// loads of a thread, 128 bytes, are issued at once. What the blocks of a cluster need of one another is the mean of each row's part
// and the sum of squares about it, which every block writes into the shared memory of all others. From these, each finds the row's
// mean and deviation, always in the same order (https://doi.org/10.1080/00031305.1983.10483115). 32 rows are 32 bytes of a column:
// a run of the transpose is a whole sector.
//
//     16-bit: 32 KB of loads in flight per block, 4 blocks per multiprocessor, whose phases have nothing to do with one another;
//             24 KB of shared memory each, of which the transpose is 16 KB; 64 registers per thread, half of them x
//             [16384, 2048]: 512 clusters of 4 blocks, 3.9 times as many as 132 multiprocessors run at once
#pragma once

#include <cstdint>

#include "cluster.cuh"
#include "fp8.cuh"
#include "norm.cuh"
#include "reduce.cuh"
#include "scale_source.cuh"
#include "vector.cuh"

namespace jax_fp8::norm {

constexpr int kClusterRows = 32;
constexpr int kClusterThreads = 256;
constexpr int kClusterOccupancy = 4;  // blocks per multiprocessor, which the registers must allow
constexpr int kClusterCarveout = 55;  // percent of a multiprocessor's memory that these blocks share; the rest is L1 cache
constexpr int kMaxClusterBlocks = 16;
constexpr int kWarpRows = 4;          // four bytes of a column make one word of the transpose
constexpr int kColumnWords = kClusterRows / kWarpRows;
constexpr int kLaneParts = kMaxClusterBlocks / kLanesPerSum;  // parts of a row that a lane adds up
static_assert(kClusterThreads / kWarp * kWarpRows == kClusterRows);

// Vectors of a row that a lane holds.
template <typename T>
constexpr int kLaneVectors = 4 / sizeof(T);

template <typename T>
constexpr int kClusterCols = kLaneVectors<T> * kWarp * kVectorWidth;

// Where a block's columns begin: each of the 1 << log2_blocks has as many as another, give or take 16.
__device__ inline int first_col_of(int block, int cols, int log2_blocks) { return ((cols >> 4) * block >> log2_blocks) * 16; }

// What a block knows of its part of a row.
struct alignas(8) Part {
  float mean;
  float squares;  // of the distances to this mean, added up
};

struct alignas(8) Statistics {
  float mean, rstd;
};

// What a lane holds of x: four rows, in vectors 256 columns apart. Columns count from the block's first.
template <typename T>
struct Patch {
  int col, end;  // of the first vector; behind the last that is there
  Vector<T> rows[kLaneVectors<T>][kWarpRows];

  __device__ int col_of(int v) const { return col + v * kWarp * kVectorWidth; }
  __device__ bool holds(int v) const { return col_of(v) < end; }
};

template <typename T>
__device__ inline void load(const T* first_row, int64_t cols, Patch<T>& patch) {
#pragma unroll
  for (int v = 0; v < kLaneVectors<T>; ++v) {
    if (!patch.holds(v)) continue;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) patch.rows[v][r] = load_vector(first_row + r * cols + patch.col_of(v));
  }
}

// What the block knows of the warp's rows, in two passes over the registers: lane i gets it for row i / 8.
template <typename T>
__device__ inline Part measure(const Patch<T>& patch, int block_cols, bool centres) {
  float mean = 0.0f;
  float means[kWarpRows] = {};
  if (centres) {
    float sums[kWarpRows] = {};
#pragma unroll
    for (int v = 0; v < kLaneVectors<T>; ++v) {
      if (!patch.holds(v)) continue;
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        float x[kVectorWidth];
        unpack(patch.rows[v][r], x);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) sums[r] = __fadd_rn(sums[r], x[j]);
      }
    }
    mean = mean_of(four_warp_sums(sums), block_cols);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) means[r] = __shfl_sync(0xFFFFFFFFu, mean, r * kLanesPerSum);
  }
  float squares[kWarpRows] = {};
#pragma unroll
  for (int v = 0; v < kLaneVectors<T>; ++v) {
    if (!patch.holds(v)) continue;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      float x[kVectorWidth];
      unpack(patch.rows[v][r], x);
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) squares[r] = add_square(squares[r], __fsub_rn(x[j], means[r]));
    }
  }
  return {mean, four_warp_sums(squares)};
}

// Scale and bias of the block's columns, each as [half of a vector][vector]: then neighbouring lanes read neighbouring 16 bytes.
// They are read from memory while x is on its way, and needed when registers are scarce and a barrier has emptied the L1 cache.
template <typename T>
using Parameters = float4[2][2][kClusterCols<T> / kVectorWidth];

template <typename T>
__device__ inline void keep_parameters(const Rows<T>& input, int first_col, int block_cols, Parameters<T>& kept) {
  constexpr int kFours = kClusterCols<T> / 4;
  const int which = static_cast<int>(threadIdx.x / kFours), four = static_cast<int>(threadIdx.x % kFours);
  if (which >= 2 || four * 4 >= block_cols) return;
  const float* source = which == 0 ? input.norm_scale : input.norm_bias;
  const float4 none = make_float4(kNoBias, kNoBias, kNoBias, kNoBias);
  kept[which][four & 1][four >> 1] = source != nullptr ? __ldg(reinterpret_cast<const float4*>(source + first_col) + four) : none;
}

template <typename T>
__device__ inline void read_parameter(const Parameters<T>& kept, int which, int vector, float (&out)[kVectorWidth]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 four = kept[which][half][vector];
    out[4 * half] = four.x, out[4 * half + 1] = four.y, out[4 * half + 2] = four.z, out[4 * half + 3] = four.w;
  }
}

// A row's part goes to all blocks of the cluster, by the eight lanes that know it.
__device__ inline void publish(const Part& part, Part& slot, int log2_blocks) {
#pragma unroll
  for (int k = 0; k < kLaneParts; ++k) {
    const int block = static_cast<int>(threadIdx.x % kLanesPerSum) + k * kLanesPerSum;
    if (block >> log2_blocks == 0) *in_block(&slot, block) = part;
  }
}

// Mean and 1 / deviation of a row, out of its parts. Eight neighbouring lanes have the same row, and get the same.
__device__ inline Statistics combine(const Part (*parts)[kClusterRows], int row, int cols, int log2_blocks, float epsilon) {
  Part part[kLaneParts] = {};
  float count[kLaneParts] = {};
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kLaneParts; ++k) {
    const int block = static_cast<int>(threadIdx.x % kLanesPerSum) + k * kLanesPerSum;
    if (block >> log2_blocks != 0) continue;
    part[k] = parts[block][row];
    count[k] = static_cast<float>(first_col_of(block + 1, cols, log2_blocks) - first_col_of(block, cols, log2_blocks));
    sum = __fmaf_rn(count[k], part[k].mean, sum);
  }
  const float mean = mean_of(warp_sum<kLanesPerSum>(sum), cols);
#pragma unroll
  for (int k = 0; k < kLaneParts; ++k) {
    const float distance = __fsub_rn(part[k].mean, mean);
    squares = __fadd_rn(squares, __fmaf_rn(__fmul_rn(count[k], distance), distance, part[k].squares));
  }
  return {mean, rstd_of(warp_sum<kLanesPerSum>(squares), cols, epsilon)};
}

// Word w of a column has the rows of warp w. Column c of the block is 8 words, which live at (8 * c + w) ^ (c / 8 % 32): so the
// words that the 32 lanes of a warp write at once, 8 columns apart, meet 32 banks.
__device__ inline void put_columns(uint32_t* tile, int v, const uint32_t (&left)[4], const uint32_t (&right)[4]) {
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  uint32_t columns[2][4];
  transpose_bytes(left, columns[0]);
  transpose_bytes(right, columns[1]);
  uint32_t* words = tile + (v * kWarp + lane) * kVectorWidth * kColumnWords;
#pragma unroll
  for (int c = 0; c < kVectorWidth; ++c) words[(c * kColumnWords + warp) ^ lane] = columns[c / 4][c % 4];
}

// Two neighbouring threads store one column, 128 columns at once.
template <typename T>
__device__ inline void store_columns(const uint32_t* tile, int cols, int64_t rows, int64_t first_row, uint8_t* values_t) {
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

// Rows and cols are multiples of 16, cols at most kClusterCols << log2_blocks, pointers multiples of 16 bytes. kCasts: more than
// the amax is wanted.
template <typename T, Fp8Type kFormat, bool kCasts>
__global__ void __launch_bounds__(kClusterThreads, kClusterOccupancy)
    cluster_kernel(Rows<T> input, DeviceScaleSource scale, int log2_blocks, NormResults results) {
  __shared__ Part parts[kMaxClusterBlocks][kClusterRows];
  __shared__ Statistics statistics[kClusterRows];
  __shared__ Parameters<T> parameters;
  __shared__ uint32_t tile[kCasts ? kClusterCols<T> * kColumnWords : 1];
  arrive_at_cluster_with_nothing();
  const float loaded = kCasts ? __ldg(scale.element) : 0.0f;
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  const int cols = static_cast<int>(input.cols);
  const int block = static_cast<int>(blockIdx.x) & ((1 << log2_blocks) - 1);
  const int first_col = first_col_of(block, cols, log2_blocks);
  const int block_cols = first_col_of(block + 1, cols, log2_blocks) - first_col;
  const int64_t first_row = int64_t{blockIdx.x >> log2_blocks} * kClusterRows, row = first_row + warp * kWarpRows;
  const bool has_rows = row < input.rows;  // of the last 32, only 16 may be there
  Patch<T> patch;
  patch.col = lane * kVectorWidth, patch.end = has_rows ? block_cols : 0;
  load(input.x + row * cols + first_col, cols, patch);
  keep_parameters<T>(input, first_col, block_cols, parameters);
  const Part part = measure(patch, block_cols, input.norm_bias != nullptr);

  const int own_row = warp * kWarpRows + lane / kLanesPerSum;
  wait_for_cluster();  // until every block has begun
  publish(part, parts[block][own_row], log2_blocks);
  arrive_at_cluster();
  wait_for_cluster();
  const Statistics of_own_row = combine(parts, own_row, cols, log2_blocks, input.epsilon);
  if (lane % kLanesPerSum == 0) statistics[own_row] = of_own_row;
  if (lane % kLanesPerSum == 0 && block == 0 && has_rows) {
    if (results.mean != nullptr) results.mean[first_row + own_row] = of_own_row.mean;
    if (results.rstd != nullptr) results.rstd[first_row + own_row] = of_own_row.rstd;
  }
  __syncwarp();

  const float multiplier = kCasts ? multiplier_from<kFormat>(loaded, scale) : 0.0f;
  float thread_amax = 0.0f;
#pragma unroll
  for (int v = 0; v < kLaneVectors<T>; ++v) {
    if (!patch.holds(v)) continue;
    const int col = first_col + patch.col_of(v);
    float norm_scale[kVectorWidth], norm_bias[kVectorWidth];
    read_parameter<T>(parameters, 0, v * kWarp + lane, norm_scale);
    read_parameter<T>(parameters, 1, v * kWarp + lane, norm_bias);
    uint32_t left[kWarpRows], right[kWarpRows];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const Statistics of_row = statistics[warp * kWarpRows + r];
      float x[kVectorWidth];
      unpack(patch.rows[v][r], x);
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) x[j] = normalized(x[j], of_row.mean, of_row.rstd, norm_scale[j], norm_bias[j]);
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
      store_columns<T>(tile, block_cols, input.rows, first_row, results.values_t + first_col * input.rows);
    }
  }
  // The largest, rounded, is the largest of the rounded.
  merge_amax<kClusterThreads>(to_float(from_float<T>(thread_amax)), results.amax);
}

}  // namespace jax_fp8::norm
