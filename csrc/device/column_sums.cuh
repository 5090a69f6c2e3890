// The last step of column sums: adds the partial sums of all parts of the rows, in an order that never changes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../column_sums.h"
#include "../launch.h"

namespace jax_fp8 {

constexpr int kSumThreads = 256;
constexpr int kSumCols = 32;                      // columns of a block, one per lane
constexpr int kSumRows = kSumThreads / kSumCols;  // parts that a block reads at once, one per warp

// Blocks (i, 0) add up 32 columns of the first array, and blocks (i, 1) of the second. The loop is unrolled eight
// times, so that each thread has eight loads in flight.
static __global__ void __launch_bounds__(kSumThreads)
    column_sums_kernel(ColumnSums first, ColumnSums second, int64_t parts, int64_t cols) {
  __shared__ float shared[kSumRows][kSumCols];
  const ColumnSums array = blockIdx.y == 0 ? first : second;
  const int lane = static_cast<int>(threadIdx.x) % kSumCols, row = static_cast<int>(threadIdx.x) / kSumCols;
  const int64_t col = int64_t{blockIdx.x} * kSumCols + lane;
  float sum = 0.0f;
  if (col < cols) {
#pragma unroll 8
    for (int64_t i = row; i < parts; i += kSumRows) sum = __fadd_rn(sum, __ldg(array.partial + i * cols + col));
  }
  shared[row][lane] = sum;
  __syncthreads();
  if (row != 0 || col >= cols) return;
#pragma unroll
  for (int i = 1; i < kSumRows; ++i) sum = __fadd_rn(sum, shared[i][lane]);
  array.result[col] = sum;
}

// The sums of one array, or of two of the same shape in the same launch.
inline void launch_column_sums(const ColumnSums& first, const ColumnSums& second, int64_t parts, int64_t cols,
                               cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(divide_up(cols, kSumCols)), second.result != nullptr ? 2 : 1);
  column_sums_kernel<<<grid, kSumThreads, 0, stream>>>(first, second, parts, cols);
}

}  // namespace jax_fp8
