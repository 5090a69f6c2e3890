// LayerNorm and RMSNorm with the cast to FP8 in the same pass. Their backward adds the gradient of the residual stream
// in the same pass too.
//
//     layernorm: y = (x - mean) * rstd * scale + bias        rmsnorm: y = x * rstd * scale
//
// y is rounded to the dtype of x, as if it had been stored, and then quantized. The kernels read x from memory once.
// Only a cast by tiles of rows that a cluster of blocks cannot hold reads x twice.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "by_tile.h"
#include "dtypes.h"
#include "scale_source.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

struct NormArguments {
  const void* x;  // [rows, cols]
  SourceType x_type;
  const float* norm_scale;  // [cols]
  const float* norm_bias;   // [cols]; nullptr for RMSNorm
  float epsilon;
  int64_t rows;
  int64_t cols;  // at least 1
};

// Results that the caller does not need are nullptr.
struct NormResults {
  uint8_t* values;    // [rows, cols]
  uint8_t* values_t;  // [cols, rows]
  float* amax;
  float* mean;  // [rows, 1]
  float* rstd;  // [rows, 1]
};

struct NormQuantizeArguments {
  NormArguments norm;
  ScaleSource source;
  Fp8Type format;
  float* scale;  // the scale that the kernel used: y ≈ values * scale
  NormResults results;
};

struct NormQuantizeByTileArguments {
  NormArguments norm;
  TileCast cast;
  float* mean;  // [rows, 1]; nullptr: RMSNorm
  float* rstd;  // [rows, 1]
};

struct NormBackwardArguments {
  const void* dy;        // [rows, cols]
  const void* x;         // [rows, cols]
  const void* residual;  // [rows, cols], the residual stream's gradient, which is added to dx; or nullptr
  SourceType type;       // of dy, x, residual and dx
  const float* norm_scale;  // [cols]
  const float* mean;        // [rows, 1]; nullptr: RMSNorm
  const float* rstd;        // [rows, 1]
  void* dx;                 // [rows, cols]
  float* dscale;            // [cols]
  float* dbias;             // [cols]; nullptr: RMSNorm
  float* dscale_partials;   // [partials, cols]: each row has the sums over the rows of one block
  float* dbias_partials;    // [partials, cols]; nullptr: RMSNorm
  int64_t partials;         // at least 1
  int64_t rows;
  int64_t cols;  // at least 1
};

cudaError_t launch_norm_quantize(const NormQuantizeArguments& arguments, cudaStream_t stream);
cudaError_t launch_norm_quantize_by_tile(const NormQuantizeByTileArguments& arguments, cudaStream_t stream);
cudaError_t launch_norm_amax(const NormArguments& arguments, float* amax, cudaStream_t stream);
cudaError_t launch_norm_backward(const NormBackwardArguments& arguments, cudaStream_t stream);

extern XLA_FFI_Handler* const norm_quantize_handler;
extern XLA_FFI_Handler* const norm_quantize_by_tile_handler;
extern XLA_FFI_Handler* const norm_amax_handler;
extern XLA_FFI_Handler* const norm_backward_handler;

}  // namespace jax_fp8
