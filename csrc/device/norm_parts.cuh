// The row statistics of a cluster whose blocks share the columns: the mean of every row, and its deviation.
//
// A warp has four rows of a block's 512 columns (256 for float32). x stays in the warp's registers, and a thread issues
// all its loads, 128 bytes, at once. Each block computes the mean of its part of a row and the sum of squares about
// that mean, and writes both into the shared memory of all blocks of the cluster. Every block combines the parts to the
// row's mean and deviation, always in the same order (https://doi.org/10.1080/00031305.1983.10483115). So kernels that
// divide the columns of a matrix in the same way compute the same bits.
#pragma once

#include <cstdint>

#include "cluster.cuh"
#include "norm.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace jax_fp8::norm {

constexpr int kWarpRows = 4;  // four bytes of a column make one word of the transpose
constexpr int kMostParts = 16;  // of a row
constexpr int kLaneParts = kMostParts / kLanesPerSum;  // of a row, that a lane combines

// The vectors of a row that a lane holds.
template <typename T>
constexpr int kLaneVectors = 4 / sizeof(T);

template <typename T>
constexpr int kClusterCols = kLaneVectors<T> * kWarp * kVectorWidth;

// The first column of a block. The 1 << log2_blocks blocks have the same number of columns, give or take 16.
__device__ inline int first_col_of(int block, int cols, int log2_blocks) {
  return ((cols >> 4) * block >> log2_blocks) * 16;
}

// The part of the matrix that a block of the grid has: its rows, and its columns of these.
struct Place {
  int log2_blocks, block;
  int first_col, cols;
  int64_t first_row;
};

__device__ inline Place place_of(int cols, int rows, int log2_blocks) {
  const int block = static_cast<int>(blockIdx.x) & ((1 << log2_blocks) - 1);
  const int first_col = first_col_of(block, cols, log2_blocks);
  return {log2_blocks, block, first_col, first_col_of(block + 1, cols, log2_blocks) - first_col,
          int64_t{blockIdx.x >> log2_blocks} * rows};
}

// The statistics of a block's part of a row.
struct alignas(8) Part {
  float mean;
  float squares;  // the sum of (x - mean)²
};

struct alignas(8) Statistics {
  float mean, rstd;
};

// The elements of x that a lane holds: four rows, in vectors 256 columns apart. Columns count from the block's first.
template <typename T>
struct Patch {
  int col, end;  // the column of the first vector; the end of the columns that exist
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

// Computes a Part for each of the warp's rows, in two passes over the registers. Lane i gets that of row i / 8.
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

// The norm's scale and bias for the block's columns, each as [half of a vector][vector], so that neighbouring lanes
// read neighbouring 16 bytes. They are loaded to shared memory while x is being loaded. They are needed later, when
// registers are scarce and a barrier has invalidated the L1 cache.
template <typename T>
using Parameters = float4[2][2][kClusterCols<T> / kVectorWidth];

template <typename T>
__device__ inline void keep_parameters(const Rows<T>& input, int first_col, int block_cols, Parameters<T>& kept) {
  constexpr int kFours = kClusterCols<T> / 4;
  const int which = static_cast<int>(threadIdx.x / kFours), four = static_cast<int>(threadIdx.x % kFours);
  if (which >= 2 || four * 4 >= block_cols) return;
  const float* source = which == 0 ? input.norm_scale : input.norm_bias;
  const float4 none = make_float4(kNoBias, kNoBias, kNoBias, kNoBias);
  kept[which][four & 1][four >> 1] =
      source != nullptr ? __ldg(reinterpret_cast<const float4*>(source + first_col) + four) : none;
}

template <typename T>
__device__ inline void read_parameter(const Parameters<T>& kept, int which, int vector, float (&out)[kVectorWidth]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 four = kept[which][half][vector];
    out[4 * half] = four.x, out[4 * half + 1] = four.y, out[4 * half + 2] = four.z, out[4 * half + 3] = four.w;
  }
}

// The eight lanes that have a row's Part write it to all blocks that share the row.
__device__ inline void publish(const Part& part, Part& slot, int first_rank, int log2_blocks) {
#pragma unroll
  for (int k = 0; k < kLaneParts; ++k) {
    const int block = static_cast<int>(threadIdx.x % kLanesPerSum) + k * kLanesPerSum;
    if (block >> log2_blocks == 0) *in_block(&slot, first_rank + block) = part;
  }
}

// The mean and rstd = 1 / deviation of a row from its parts. Eight neighbouring lanes work on the same row, and all get
// the result.
template <int kRows>
__device__ inline Statistics combine(const Part (*parts)[kRows], int row, int cols, int log2_blocks, float epsilon) {
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

// The shared memory of a block of kRows rows.
template <typename T, int kRows, int kBlocks>
struct Known {
  Part parts[kBlocks][kRows];
  Statistics statistics[kRows];
  Parameters<T> parameters;
};

// Loads the block's part of x, and computes the statistics of its rows, which it also stores at `mean` and `rstd`
// unless these are null. The blocks that share the rows are those from rank `first_rank` on in their cluster. Every
// thread of the cluster must call it. Afterwards a warp may read the statistics of its own rows, and the parameters of
// all columns.
template <typename T, int kRows, int kBlocks>
__device__ inline void find_statistics(const Rows<T>& input, const Place& place, int first_rank, float* mean,
                                       float* rstd, Patch<T>& patch, Known<T, kRows, kBlocks>& known) {
  arrive_at_cluster_with_nothing();
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  const int cols = static_cast<int>(input.cols);
  const int64_t row = place.first_row + warp * kWarpRows;
  const bool has_rows = row < input.rows;  // the last block may have only 16 rows
  patch.col = lane * kVectorWidth, patch.end = has_rows ? place.cols : 0;
  load(input.x + row * cols + place.first_col, cols, patch);
  keep_parameters<T>(input, place.first_col, place.cols, known.parameters);
  const Part part = measure(patch, place.cols, input.norm_bias != nullptr);

  const int own_row = warp * kWarpRows + lane / kLanesPerSum;
  wait_for_cluster();  // until every block has begun
  publish(part, known.parts[place.block][own_row], first_rank, place.log2_blocks);
  arrive_at_cluster();
  wait_for_cluster();
  const Statistics of_own_row = combine(known.parts, own_row, cols, place.log2_blocks, input.epsilon);
  if (lane % kLanesPerSum == 0) known.statistics[own_row] = of_own_row;
  if (lane % kLanesPerSum == 0 && place.block == 0 && has_rows) {
    if (mean != nullptr) mean[place.first_row + own_row] = of_own_row.mean;
    if (rstd != nullptr) rstd[place.first_row + own_row] = of_own_row.rstd;
  }
  __syncwarp();
}

}  // namespace jax_fp8::norm
