// The transpose of a matrix of FP8 values of either format. The kernel moves bytes and never interprets them.
//
// Devices exchange FP8 values in one orientation only, since bandwidth between them is scarce. A GEMM that contracts
// the other dim needs the other orientation, and this kernel makes it.
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
