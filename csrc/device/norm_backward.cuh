// The gradients of a norm from one read of dy and x:
//
//     dnormalized = dy * scale
//     dx = (dnormalized - normalized * mean(dnormalized * normalized) - mean(dnormalized)) * rstd
//     dscale = sum over rows of dy * normalized        dbias = sum over rows of dy
//
// RMSNorm has no last mean, and a residual's gradient is added to dx if there is one.
//
// A block takes a few rows at a time, so that one reduction over the block serves all of them. A thread has the same
// columns of all rows of its block, and adds up their column sums in shared memory, where no other thread writes. Each
// block then writes one row of partial sums, and a second kernel adds these, always in the same order.
#pragma once

#include <cstdint>

#include "reduce.cuh"
#include "vector.cuh"

namespace jax_fp8::norm_backward {

template <typename T>
struct Gradients {
  const T *dy, *x, *residual;  // no residual: nullptr
  const float *norm_scale, *mean, *rstd;
  T* dx;
  float *dscale, *dbias;  // [blocks, cols]; no dbias: nullptr
  int64_t rows, cols;
};

// The numbers of a row that all its elements need.
struct RowState {
  float mean, rstd;
  float dot, total;  // means of dnormalized * normalized and of dnormalized; the latter 0 for RMSNorm
};

__device__ inline float normalized(float x, const RowState& row) { return __fmul_rn(__fsub_rn(x, row.mean), row.rstd); }

__device__ inline float gradient(float dy, float normalized, float norm_scale, const RowState& row, float residual) {
  const float projected = __fmaf_rn(-normalized, row.dot, __fmul_rn(dy, norm_scale));
  return __fmaf_rn(__fsub_rn(projected, row.total), row.rstd, residual);
}

// ---- vectors: rows are multiples of 16 bytes ------------------------------------------------------------------------

// The rows that a block takes at once: so many that each thread has some 200 bytes of dy, x and residual in flight. Two
// or more blocks of few threads share a multiprocessor. A block of 1,024 threads has 64 registers for each thread, so
// it takes fewer rows.
template <typename T, int kThreads>
constexpr int kBlockRows = (kThreads <= 256 ? 8 : 4) / sizeof(T);

constexpr int kFewThreads = 256;
constexpr int kManyThreads = 1024;
constexpr int64_t kMaxCols = 1 << 20;

template <typename T, int kRows>
struct Vectors {
  Vector<T> dy[kRows], x[kRows], residual[kRows];
};

template <typename T, int kRows>
__device__ inline void load_rows(const T* source, int64_t first_row, int col, const Gradients<T>& g, uint32_t missing,
                                 Vector<T> (&vectors)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool inside = source != nullptr && first_row + r < g.rows && col < g.cols;
    vectors[r] = inside ? load_vector(source + (first_row + r) * g.cols + col) : filled_with<T>(missing);
  }
}

// Adds the contribution of these columns to each row's two sums: dnormalized * normalized, and dnormalized.
template <typename T, int kRows>
__device__ inline void add_to_row_sums(const Vectors<T, kRows>& vectors, const RowState (&rows)[kRows],
                                       const float* norm_scale, float (&row_sums)[2 * kRows]) {
  float scales[kVectorWidth];
  unpack(load_vector(norm_scale), scales);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float dy[kVectorWidth], x[kVectorWidth];
    unpack(vectors.dy[r], dy);
    unpack(vectors.x[r], x);
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) {
      const float dnormalized = __fmul_rn(dy[j], scales[j]);
      row_sums[r] = __fmaf_rn(dnormalized, normalized(x[j], rows[r]), row_sums[r]);
      row_sums[kRows + r] = __fadd_rn(row_sums[kRows + r], dnormalized);
    }
  }
}

__device__ inline void to_array(float4 x, float (&out)[4]) { out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w; }

__device__ inline float4 to_float4(const float (&x)[4]) { return make_float4(x[0], x[1], x[2], x[3]); }

// Stores dx of these columns, and adds their contribution to the column sums at `sums`, [dscale, dbias][half][thread]:
// in this order neighbouring threads access different banks. It takes one half of the columns after the other, which
// saves a vector's worth of registers.
template <typename T, int kRows>
__device__ inline void store_rows(const Vectors<T, kRows>& vectors, const RowState (&rows)[kRows], int64_t first_row,
                                  int col, const Gradients<T>& g, float4* sums) {
  Vector<T> stored[kRows];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float scales[4], dscale[4], dbias[4];
    float4* const dscale_sums = sums + half * blockDim.x;
    float4* const dbias_sums = sums + (2 + half) * blockDim.x;
    to_array(__ldg(reinterpret_cast<const float4*>(g.norm_scale + col) + half), scales);
    to_array(*dscale_sums, dscale);
    to_array(*dbias_sums, dbias);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float dy[4], x[4], dx[4];
      unpack(vectors.dy[r], dy, 4 * half);
      unpack(vectors.x[r], x, 4 * half);
      unpack(vectors.residual[r], dx, 4 * half);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float y = normalized(x[j], rows[r]);
        dscale[j] = __fmaf_rn(dy[j], y, dscale[j]);
        dbias[j] = __fadd_rn(dbias[j], dy[j]);
        dx[j] = gradient(dy[j], y, scales[j], rows[r], dx[j]);
      }
      pack(dx, stored[r], 4 * half);
    }
    *dscale_sums = to_float4(dscale);
    *dbias_sums = to_float4(dbias);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first_row + r < g.rows) store_vector(g.dx + (first_row + r) * g.cols + col, stored[r]);
  }
}

// A row has up to `passes` vectors for each thread. The vectors of the last pass stay in registers during the
// reduction; those of the other passes are read again, from L2. Dynamic shared memory: the column sums as
// [pass][dscale, dbias][half][thread].
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == kFewThreads ? 2 : 1) rows_kernel(Gradients<T> g, int passes) {
  constexpr int kRows = kBlockRows<T, kThreads>;
  extern __shared__ float4 shared[];
  __shared__ float scratch[2][kWarp][2 * kRows];  // two, in turns, so that one barrier for each reduction is enough
  const int threads = static_cast<int>(blockDim.x);
  const float per_col = __frcp_rn(static_cast<float>(g.cols));
  const auto col_of = [&](int pass) { return (pass * threads + static_cast<int>(threadIdx.x)) * kVectorWidth; };
  const auto sums_of = [&](int pass) { return shared + pass * 4 * threads + threadIdx.x; };
  for (int i = 0; i < 4 * passes; ++i) shared[i * threads + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  int turn = 0;
  for (int64_t first_row = int64_t{blockIdx.x} * kRows; first_row < g.rows; first_row += int64_t{gridDim.x} * kRows) {
    Vectors<T, kRows> vectors;
    RowState rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool inside = first_row + r < g.rows;
      rows[r].mean = inside && g.mean != nullptr ? __ldg(g.mean + first_row + r) : 0.0f;
      rows[r].rstd = inside ? __ldg(g.rstd + first_row + r) : 0.0f;
    }
    float row_sums[2 * kRows] = {};
    for (int pass = 0; pass < passes; ++pass) {
      load_rows(g.dy, first_row, col_of(pass), g, 0, vectors.dy);
      load_rows(g.x, first_row, col_of(pass), g, 0, vectors.x);
      if (pass == passes - 1) load_rows(g.residual, first_row, col_of(pass), g, kNegativeZeros<T>, vectors.residual);
      if (col_of(pass) < g.cols) add_to_row_sums(vectors, rows, g.norm_scale + col_of(pass), row_sums);
    }
    block_sums(row_sums, scratch[turn]);
    turn ^= 1;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r].dot = __fmul_rn(row_sums[r], per_col);
      rows[r].total = g.mean != nullptr ? __fmul_rn(row_sums[kRows + r], per_col) : 0.0f;
    }
    for (int pass = passes - 1; pass >= 0; --pass) {
      if (col_of(pass) >= g.cols) continue;
      if (pass != passes - 1) {
        load_rows(g.dy, first_row, col_of(pass), g, 0, vectors.dy);
        load_rows(g.x, first_row, col_of(pass), g, 0, vectors.x);
        load_rows(g.residual, first_row, col_of(pass), g, kNegativeZeros<T>, vectors.residual);
      }
      store_rows(vectors, rows, first_row, col_of(pass), g, sums_of(pass));
    }
  }
  for (int pass = 0; pass < passes; ++pass) {
    if (col_of(pass) >= g.cols) break;
    const int64_t offset = blockIdx.x * g.cols + col_of(pass);
    for (int half = 0; half < 2; ++half) {
      reinterpret_cast<float4*>(g.dscale + offset)[half] = sums_of(pass)[half * threads];
      if (g.dbias != nullptr) reinterpret_cast<float4*>(g.dbias + offset)[half] = sums_of(pass)[(2 + half) * threads];
    }
  }
}

// ---- one element at a time: any shape -------------------------------------------------------------------------------

constexpr int kAnyThreads = 256;

// A thread adds up its column sums in global memory, where the second kernel reads them.
template <typename T>
__global__ void __launch_bounds__(kAnyThreads) any_kernel(Gradients<T> g) {
  __shared__ float scratch[2][kWarp][2];
  const float per_col = __frcp_rn(static_cast<float>(g.cols));
  int turn = 0;
  for (int64_t r = blockIdx.x; r < g.rows; r += gridDim.x, turn ^= 1) {
    RowState row{g.mean != nullptr ? __ldg(g.mean + r) : 0.0f, __ldg(g.rstd + r), 0.0f, 0.0f};
    float row_sums[2] = {};
    for (int64_t col = threadIdx.x; col < g.cols; col += kAnyThreads) {
      const int64_t i = r * g.cols + col;
      const float dnormalized = __fmul_rn(to_float(g.dy[i]), __ldg(g.norm_scale + col));
      row_sums[0] = __fmaf_rn(dnormalized, normalized(to_float(g.x[i]), row), row_sums[0]);
      row_sums[1] = __fadd_rn(row_sums[1], dnormalized);
    }
    block_sums(row_sums, scratch[turn]);
    row.dot = __fmul_rn(row_sums[0], per_col);
    if (g.mean != nullptr) row.total = __fmul_rn(row_sums[1], per_col);
    const bool is_first = r == blockIdx.x;
    for (int64_t col = threadIdx.x; col < g.cols; col += kAnyThreads) {
      const int64_t i = r * g.cols + col, sum = blockIdx.x * g.cols + col;
      const float dy = to_float(g.dy[i]), y = normalized(to_float(g.x[i]), row);
      const float residual = g.residual != nullptr ? to_float(g.residual[i]) : -0.0f;
      g.dx[i] = from_float<T>(gradient(dy, y, __ldg(g.norm_scale + col), row, residual));
      g.dscale[sum] = __fmaf_rn(dy, y, is_first ? 0.0f : g.dscale[sum]);
      if (g.dbias != nullptr) g.dbias[sum] = __fadd_rn(dy, is_first ? 0.0f : g.dbias[sum]);
    }
  }
}

}  // namespace jax_fp8::norm_backward
