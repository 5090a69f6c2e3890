// values = saturate(x * (1 / scale)) in FP8. The same pass computes amax = max|x|, and the transpose if requested.
//
// Hopper's tensor cores read FP8 operands only contiguous along the contracted dim. The forward contracts one dim of a
// tensor and the backward the other, so most tensors are needed in both orientations. The cast is limited by memory: it
// is cheap because one read of the source gives values, transpose and amax. The column sums, the gradient of a bias,
// come from the same read.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "by_tile.h"
#include "column_sums.h"
#include "dtypes.h"
#include "scale_source.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

constexpr int kMaxMatrices = 3;  // queries, keys and values

// Matrices with the same number of rows, side by side. The kernel casts them as one matrix, without a concatenation.
struct Matrices {
  const void* x[kMaxMatrices];  // [rows, ends[i] - ends[i - 1]]; null past the last matrix
  int64_t ends[kMaxMatrices];   // the column after the last of each; past the last matrix, the number of all columns
};

struct QuantizeArguments {
  Matrices x;  // [rows, cols] together; launch_quantize takes one matrix
  SourceType x_type;
  ScaleSource source;
  Fp8Type format;
  uint8_t* values;    // [rows, cols]
  uint8_t* values_t;  // [cols, rows]; unused by launch_quantize
  float* amax;
  float* scale;     // the scale that the kernel used: x ≈ values * scale
  ColumnSums sums;  // [cols]; optional, and only of launch_quantize_transpose
  int64_t rows;
  int64_t cols;
};

struct QuantizeByTileArguments {
  Matrices x;  // [rows, cols] together
  SourceType x_type;
  TileCast cast;
  ColumnSums sums;  // [cols]; optional
  int64_t rows;
  int64_t cols;
};

cudaError_t launch_quantize(const QuantizeArguments& arguments, cudaStream_t stream);
cudaError_t launch_quantize_transpose(const QuantizeArguments& arguments, cudaStream_t stream);
cudaError_t launch_quantize_by_tile(const QuantizeByTileArguments& arguments, cudaStream_t stream);

extern XLA_FFI_Handler* const quantize_handler;
extern XLA_FFI_Handler* const quantize_transpose_handler;
extern XLA_FFI_Handler* const quantize_transpose_sums_handler;
extern XLA_FFI_Handler* const quantize_by_tile_handler;
extern XLA_FFI_Handler* const quantize_by_tile_sums_handler;

}  // namespace jax_fp8
