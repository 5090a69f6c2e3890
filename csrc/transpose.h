// The transpose of a matrix of bytes, FP8 values of either format: moved, and never looked at.
//
// Between devices FP8 travels in one orientation, since every byte counts there. A GEMM that contracts the other dim
// needs the other orientation, and here it is made.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

struct TransposeArguments {
  const uint8_t* x;    // [rows, cols]
  uint8_t* transpose;  // [cols, rows]
  int64_t rows;
  int64_t cols;
};

cudaError_t launch_transpose(const TransposeArguments& arguments, cudaStream_t stream);

extern XLA_FFI_Handler* const transpose_handler;

}  // namespace jax_fp8
