// What kernels after a product of few rows read. The product asks for it when all its own weights are under way, so
// that memory works on while sums are added, the kernel ends and the next one begins. What is asked for comes to L2.
//
//     6144 x 2048, one row, on an H100: a copy of the weights takes 4.4 us of 8.4 us. In the rest 11 MB could come.
#pragma once

#include <cstdint>

#include "../few_rows_gemm.h"
#include "prefetch.cuh"

namespace jax_fp8::few_rows_gemm {

// All threads of the grid share the rows.
__device__ inline void ask_for_upcoming(const Operands& operands) {
  const int64_t own = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, threads = int64_t{gridDim.x} * blockDim.x;
#pragma unroll 1
  for (const Upcoming& matrix : operands.upcoming) {
#pragma unroll 1
    for (int64_t row = own; row < matrix.rows; row += threads) {
      ask_for(matrix.first + row * matrix.row_bytes, matrix.asked);
    }
  }
}

}  // namespace jax_fp8::few_rows_gemm
