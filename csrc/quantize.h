// values = saturate(x * (1 / scale)) in FP8, with amax = max|x| from the same pass,
// and the transpose too when it is asked for.
//
// Hopper's FP8 GEMM wants both operands contiguous along the contracting dim, so most tensors are needed in both
// orientations. Reading the source once for values, transpose and amax is what makes the cast cheap. The sums of its
// columns, the gradient of a bias, come from the same read.
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

// Matrices of as many rows, side by side: cast as one, without being put together first.
struct Matrices {
  const void* x[kMaxMatrices];     // [rows, ends[i] - ends[i - 1]]; null past the last
  int64_t ends[kMaxMatrices];      // the column after the last of each; past the last, all columns
};

struct QuantizeArguments {
  Matrices x;  // [rows, cols] together; launch_quantize takes one
  SourceType x_type;
  ScaleSource source;
  Fp8Type format;
  uint8_t* values;    // [rows, cols]
  uint8_t* values_t;  // [cols, rows]; unused by launch_quantize
  float* amax;
  float* scale;     // the one used: x ≈ values * scale
  ColumnSums sums;  // [cols], where they are wanted of launch_quantize_transpose
  int64_t rows;
  int64_t cols;
};

struct QuantizeByTileArguments {
  Matrices x;  // [rows, cols] together
  SourceType x_type;
  TileCast cast;
  ColumnSums sums;  // [cols], where they are wanted
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
