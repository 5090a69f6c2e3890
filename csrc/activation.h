// An activation or its gradient, rounded to the dtype of its input, then quantized as in quantize.h: one read of the
// inputs for values, transpose, amax and, of a gradient, the sums of the columns.
// The activated tensor itself is never written.
//
// A gated activation takes the gate from the left half of x and gives f(gate) * linear, half as wide;
// its gradient is as wide as x.
//
// The GEMM behind the activation wants its input once straight, in the forward, and once transposed, for the gradient
// of its weight. So the forward need not write the transpose, and nobody keep it:
// the gradient, which reads x anyway, writes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "by_tile.h"
#include "column_sums.h"
#include "dtypes.h"
#include "scale_source.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

enum class Activation { kGelu, kGeluExact, kSilu, kRelu, kSquaredRelu };

struct ActivationInputs {
  const void* dy;  // [rows, width]; null for the activation itself
  const void* x;   // [rows, width], or [rows, 2 * width] of gate and linear
  SourceType type;
  Activation activation;
  bool gated;
  int64_t rows;
  int64_t width;
};

// Of y [rows, width], or of dx, which is like x. values or values_t may be null: then they are not written.
struct ActivationArguments {
  ActivationInputs inputs;
  ScaleSource source;
  Fp8Type format;
  uint8_t* values;
  uint8_t* values_t;
  float* amax;
  float* scale;     // the one used
  // Beside dx only: its column sums, and y in FP8, transposed, by the scale that the forward used.
  ColumnSums sums;
  const float* activated_scale;
  Fp8Type activated_format;
  uint8_t* activated_t;  // [width, rows]
};

// The same by tiles. Beside dx: its column sums, and y in FP8, transposed, by tiles of 1 x 128 along its rows.
struct ActivationByTileArguments {
  ActivationInputs inputs;
  TileCast cast;  // of y [rows, width], or of dx
  ColumnSums sums;
  uint8_t* activated_t;       // [width, rows]
  float* activated_scales_t;  // [rows / 128, width]
};

cudaError_t launch_activation_quantize(const ActivationArguments& arguments, cudaStream_t stream);
cudaError_t launch_activation_backward_quantize(const ActivationArguments& arguments, cudaStream_t stream);
cudaError_t launch_activation_quantize_by_tile(const ActivationByTileArguments& arguments, cudaStream_t stream);
cudaError_t launch_activation_backward_quantize_by_tile(const ActivationByTileArguments& arguments,
                                                        cudaStream_t stream);

// The amax alone, which current scaling wants first.
cudaError_t launch_activation_amax(const ActivationInputs& inputs, float* amax, cudaStream_t stream);
cudaError_t launch_activation_backward_amax(const ActivationInputs& inputs, float* amax, cudaStream_t stream);

extern XLA_FFI_Handler* const activation_quantize_handler;
extern XLA_FFI_Handler* const activation_backward_quantize_handler;
extern XLA_FFI_Handler* const activation_quantize_by_tile_handler;
extern XLA_FFI_Handler* const activation_backward_quantize_by_tile_handler;
extern XLA_FFI_Handler* const activation_amax_handler;
extern XLA_FFI_Handler* const activation_backward_amax_handler;

}  // namespace jax_fp8
