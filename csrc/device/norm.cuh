// Two kernels: rows_kernel takes blocks of 16 rows where rows and columns are multiples of 16, and any_kernel any
// shape. The usual shapes go to norm_cluster.cuh. Left for these two are rows too wide for it, odd shapes, and devices
// without clusters.
//
// A block needs the statistics of a whole row before it can quantize any of its elements. So rows_kernel keeps the rows
// in shared memory while it computes mean and variance, and reads global memory once. It writes the rows of the
// transpose in runs of 16 bytes, one byte for each row of the block: half a sector, which L2 joins with the half of the
// next block.
//
//     16-bit, n = 4096: 128 KB of x and 16 KB of transpose; 1 block of 512 threads with 64 KB of loads in flight
#pragma once

#include <cstdint>

#include "../norm.h"
#include "fp8.cuh"
#include "reduce.cuh"
#include "scale_source.cuh"
#include "vector.cuh"

namespace jax_fp8::norm {

template <typename T>
struct Rows {
  const T* x;
  const float* norm_scale;
  const float* norm_bias;
  float epsilon;
  int64_t rows, cols;
};

// The reference's order of operations: centre, multiply by rstd, then scale and shift. RMSNorm has the bias -0, which
// changes nothing, not even the sign of a zero.
__device__ inline float normalized(float x, float mean, float rstd, float norm_scale, float norm_bias) {
  return __fmaf_rn(__fmul_rn(__fsub_rn(x, mean), rstd), norm_scale, norm_bias);
}

constexpr float kNoBias = -0.0f;

__device__ inline float mean_of(float sum, int64_t count) { return __fdiv_rn(sum, static_cast<float>(count)); }

// Root and reciprocal are both rounded to nearest, so the result is within an ulp of the exact one.
__device__ inline float rstd_of(float sum_of_squares, int64_t count, float epsilon) {
  return __frcp_rn(__fsqrt_rn(__fadd_rn(mean_of(sum_of_squares, count), epsilon)));
}

__device__ inline float add_square(float sum, float x) { return __fmaf_rn(x, x, sum); }

// Stores a row's statistics in shared memory for the block, and in the results for the backward.
__device__ inline void keep_statistics(float mean, float rstd, int64_t row, const NormResults& results,
                                       float& block_mean, float& block_rstd) {
  block_mean = mean;
  block_rstd = rstd;
  if (results.mean != nullptr) results.mean[row] = mean;
  if (results.rstd != nullptr) results.rstd[row] = rstd;
}

// Whether the caller needs the cast; else only amax and statistics.
__host__ __device__ inline bool quantizes(const DeviceScaleSource& scale) { return scale.used != nullptr; }

// ---- blocks of 16 rows: rows and cols are multiples of 16, pointers of 16 bytes -------------------------------------

constexpr int kBlockRows = 16;
constexpr int kPatchRows = 4;                             // four bytes of a column make one word of the transpose
constexpr int kPatches = kBlockRows / kPatchRows;         // of a warp, one above the other
constexpr int kGroups = kWarp / kPatches;                 // of 8 columns each, side by side
constexpr int kSliceCols = kGroups * kVectorWidth;        // 64: the columns that a warp quantizes at once
constexpr int kSliceBytes = kBlockRows * kSliceCols;      // of the transpose of a warp's slice
constexpr int kRowsThreads = 512;
constexpr int64_t kMaxCols = 1 << 24;
static_assert(kBlockRows == sizeof(uint4), "a run of the transpose is one store");

// The vectors of a row that a lane loads before it needs the first: 128 bytes.
template <typename T>
constexpr int kDepth = 16 / sizeof(T);

// One warp computes a row's mean and rstd = 1 / deviation, and copies the first `held` columns to `kept`, in shared
// memory.
template <typename T>
__device__ inline void measure_row(const Rows<T>& input, int64_t row, T* kept, int held, float& mean, float& rstd) {
  const T* source = input.x + row * input.cols;
  const int cols = static_cast<int>(input.cols);
  const int first = static_cast<int>(threadIdx.x) % kWarp * kVectorWidth;
  const bool centres = input.norm_bias != nullptr;
  constexpr int kStride = kWarp * kVectorWidth;
  float sum = 0.0f;
  for (int start = first; start < cols; start += kStride * kDepth<T>) {
    Vector<T> loaded[kDepth<T>];
#pragma unroll
    for (int i = 0; i < kDepth<T>; ++i) {
      if (start + i * kStride < cols) loaded[i] = load_vector(source + start + i * kStride);
    }
#pragma unroll
    for (int i = 0; i < kDepth<T>; ++i) {
      const int col = start + i * kStride;
      if (col >= cols) break;
      if (col < held) write_vector(kept + col, loaded[i]);
      float x[kVectorWidth];
      unpack(loaded[i], x);
      if (centres) {
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) sum = __fadd_rn(sum, x[j]);
      } else {
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) sum = add_square(sum, x[j]);
      }
    }
  }
  sum = warp_sum(sum);
  mean = 0.0f;
  if (centres) {  // no barrier: a lane reads only what it has written itself
    mean = mean_of(sum, input.cols);
    sum = 0.0f;
    for (int col = first; col < cols; col += kStride) {
      float x[kVectorWidth];
      unpack(col < held ? read_vector(kept + col) : load_vector(source + col), x);
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) sum = add_square(sum, __fsub_rn(x[j], mean));
    }
    sum = warp_sum(sum);
  }
  rstd = rstd_of(sum, input.cols, input.epsilon);
}

__device__ inline void load_bias(const float* norm_bias, int col, float (&out)[kVectorWidth]) {
#pragma unroll
  for (int j = 0; j < kVectorWidth; ++j) out[j] = kNoBias;
  if (norm_bias != nullptr) unpack(load_vector(norm_bias + col), out);
}

// Dynamic shared memory: x as [16][held], then for each warp the transpose of a slice.
template <typename T, Fp8Type kFormat>
__global__ void __launch_bounds__(kRowsThreads, 1)
    rows_kernel(Rows<T> input, DeviceScaleSource scale, int held, NormResults results) {
  constexpr int kWarps = kRowsThreads / kWarp;
  extern __shared__ uint4 shared[];
  __shared__ float means[kBlockRows];
  __shared__ float rstds[kBlockRows];
  const bool casts = quantizes(scale);
  const float loaded = casts ? __ldg(scale.element) : 0.0f;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t first_row = int64_t{blockIdx.x} * kBlockRows;
  T* const kept = reinterpret_cast<T*>(shared);
  uint4* const slice = shared + kBlockRows * held * static_cast<int>(sizeof(T)) / static_cast<int>(sizeof(uint4)) +
                       warp * (kSliceBytes / static_cast<int>(sizeof(uint4)));

  for (int r = warp; r < kBlockRows; r += kWarps) {
    float mean, rstd;
    measure_row(input, first_row + r, kept + r * held, held, mean, rstd);
    if (lane == 0) keep_statistics(mean, rstd, first_row + r, results, means[r], rstds[r]);
  }
  __syncthreads();

  // Column c of a slice is 4 words. A warp writes the same column of 8 groups at once, and each group has 32 words, so
  // without a swizzle the groups would share 4 banks. Column c of group g is stored at place c ^ g of its group. Then
  // the 4 words of 8 groups fall into 32 different banks, and so do 8 threads that read the columns of one group.
  const int group = lane % kGroups, patch = lane / kGroups;
  const int cols = static_cast<int>(input.cols);
  const float multiplier = casts ? multiplier_from<kFormat>(loaded, scale) : 0.0f;
  float thread_amax = 0.0f;
  for (int first_col = warp * kSliceCols; first_col < cols; first_col += kWarps * kSliceCols) {
    const int col = first_col + group * kVectorWidth;
    if (col < cols) {
      float norm_scale[kVectorWidth], norm_bias[kVectorWidth];
      unpack(load_vector(input.norm_scale + col), norm_scale);
      load_bias(input.norm_bias, col, norm_bias);
      uint32_t left[kPatchRows], right[kPatchRows];
#pragma unroll
      for (int i = 0; i < kPatchRows; ++i) {
        const int r = patch * kPatchRows + i;
        const int64_t offset = (first_row + r) * cols + col;
        float x[kVectorWidth];
        unpack(col < held ? read_vector(kept + r * held + col) : load_vector(input.x + offset), x);
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
          x[j] = normalized(x[j], means[r], rstds[r], norm_scale[j], norm_bias[j]);
        }
        round_all<T>(x);
        thread_amax = amax_of(thread_amax, x);
        left[i] = quantize_four<kFormat>(x, multiplier);
        right[i] = quantize_four<kFormat>(x + 4, multiplier);
        if (results.values != nullptr) {
          *reinterpret_cast<uint2*>(results.values + offset) = make_uint2(left[i], right[i]);
        }
      }
      if (results.values_t != nullptr) {
        uint32_t columns[2][4];
        transpose_bytes(left, columns[0]);
        transpose_bytes(right, columns[1]);
        uint32_t* words = reinterpret_cast<uint32_t*>(slice + group * kVectorWidth) + patch;
#pragma unroll
        for (int c = 0; c < kVectorWidth; ++c) words[(c ^ group) * kPatches] = columns[c / 4][c % 4];
      }
    }
    if (results.values_t == nullptr) continue;
    __syncwarp();
#pragma unroll
    for (int column = lane; column < kSliceCols; column += kWarp) {
      const int of_group = column / kVectorWidth;
      const int64_t out_row = first_col + column;
      if (out_row >= cols) continue;
      const uint4 bytes = slice[of_group * kVectorWidth + (column % kVectorWidth ^ of_group)];
      *reinterpret_cast<uint4*>(results.values_t + out_row * input.rows + first_row) = bytes;
    }
    __syncwarp();
  }
  merge_amax<kRowsThreads>(thread_amax, results.amax);
}

// ---- blocks of 32 rows, one element at a time: any shape ------------------------------------------------------------

constexpr int kAnyRows = 32;
constexpr int kAnyThreads = 256;
constexpr int kAnyWarps = kAnyThreads / kWarp;

template <typename T>
__device__ inline void measure_row_any(const Rows<T>& input, int64_t row, float& mean, float& rstd) {
  const T* source = input.x + row * input.cols;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  mean = 0.0f;
  if (input.norm_bias != nullptr) {
    float sum = 0.0f;
    for (int64_t col = lane; col < input.cols; col += kWarp) sum = __fadd_rn(sum, to_float(source[col]));
    mean = mean_of(warp_sum(sum), input.cols);
  }
  float sum = 0.0f;
  for (int64_t col = lane; col < input.cols; col += kWarp) {
    sum = add_square(sum, __fsub_rn(to_float(source[col]), mean));
  }
  rstd = rstd_of(warp_sum(sum), input.cols, input.epsilon);
}

template <typename T, Fp8Type kFormat>
__global__ void __launch_bounds__(kAnyThreads) any_kernel(Rows<T> input, DeviceScaleSource scale, NormResults results) {
  __shared__ uint8_t tile[kAnyRows][kWarp + 4];  // the padding of 4 bytes shifts each row by one bank
  __shared__ float means[kAnyRows];
  __shared__ float rstds[kAnyRows];
  const bool casts = quantizes(scale);
  const float multiplier = casts ? multiplier_from<kFormat>(__ldg(scale.element), scale) : 0.0f;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t first_row = int64_t{blockIdx.x} * kAnyRows;
  for (int r = warp; r < kAnyRows && first_row + r < input.rows; r += kAnyWarps) {
    float mean, rstd;
    measure_row_any(input, first_row + r, mean, rstd);
    if (lane == 0) keep_statistics(mean, rstd, first_row + r, results, means[r], rstds[r]);
  }
  __syncthreads();

  float thread_amax = 0.0f;
  for (int64_t first_col = 0; first_col < input.cols; first_col += kWarp) {
    const int64_t col = first_col + lane;
    for (int r = warp; r < kAnyRows; r += kAnyWarps) {
      const int64_t row = first_row + r;
      if (row >= input.rows || col >= input.cols) continue;
      const float norm_bias = input.norm_bias != nullptr ? __ldg(input.norm_bias + col) : kNoBias;
      const float x = to_float(input.x[row * input.cols + col]);
      const T y = from_float<T>(normalized(x, means[r], rstds[r], __ldg(input.norm_scale + col), norm_bias));
      thread_amax = amax_of(thread_amax, to_float(y));
      const uint8_t value = quantize_one<kFormat>(to_float(y), multiplier);
      if (results.values != nullptr) results.values[row * input.cols + col] = value;
      tile[r][lane] = value;
    }
    if (results.values_t == nullptr) continue;
    __syncthreads();
    for (int c = warp; c < kWarp; c += kAnyWarps) {
      const int64_t out_row = first_col + c, out_col = first_row + lane;
      if (out_row < input.cols && out_col < input.rows) {
        results.values_t[out_row * input.rows + out_col] = tile[lane][c];
      }
    }
    __syncthreads();
  }
  merge_amax<kAnyThreads>(thread_amax, results.amax);
}

}  // namespace jax_fp8::norm
