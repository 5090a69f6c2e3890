// Rows of an FP8 matrix in another order, as they are and transposed. The kernel moves bytes and never interprets them.
//
// The tokens of a mixture of experts are cast once, and each is copied to the group of each of its experts. A GEMM
// reads the groups in one orientation, and the gradient of the weights in the other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

struct TakeRowsArguments {
  const uint8_t* x;        // [of_x, cols]
  const int32_t* sources;  // [rows], the row of x for each row; zeros where x has no such row
  uint8_t* taken;          // [rows, cols]
  uint8_t* transpose;      // [cols, rows], or null; then rows may be any number
  int64_t of_x;
  int64_t rows;  // a multiple of 16
  int64_t cols;  // a multiple of 16
};

// Matrices lie at multiples of 16 bytes.
cudaError_t launch_take_rows(const TakeRowsArguments& arguments, cudaStream_t stream);

extern XLA_FFI_Handler* const take_rows_handler;

}  // namespace jax_fp8
