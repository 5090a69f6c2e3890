// An activation or its gradient, rounded to the dtype of its input, then quantized as in quantize.h. One read of the
// inputs gives values, transpose and amax. The gradient's kernel gives the column sums too.
// No kernel writes the activated tensor in 16 or 32 bits: only its FP8 values reach memory.
//
// A gated activation takes the gate from the left half of x and returns f(gate) * linear, half as wide as x.
// Its gradient is as wide as x.
//
// The GEMM after the activation reads its input twice: rowwise in the forward, and transposed in the backward for the
// weight's gradient. The forward may leave the transpose out, so that no residual holds it until the backward: the
// gradient's kernel reads x anyway, computes the activation again and writes the transpose then.
//
// Rows may have weights: then y is f(x) times the weight of its row, rounded once, and dx is that of this y.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "by_tile.h"
#include "column_sums.h"
#include "dtypes.h"
#include "scale_source.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

enum class Activation { kGelu, kGeluExact, kSilu, kRelu, kSquaredRelu };

struct NamedActivation {
  std::string_view name;
  Activation activation;
  bool gated;
};

constexpr NamedActivation kActivations[] = {
    {"gelu", Activation::kGelu, false},     {"gelu_exact", Activation::kGeluExact, false},
    {"silu", Activation::kSilu, false},     {"relu", Activation::kRelu, false},
    {"squared_relu", Activation::kSquaredRelu, false},
    {"swiglu", Activation::kSilu, true},    {"geglu", Activation::kGelu, true},
    {"reglu", Activation::kRelu, true},
};

// Null if there is none of this name.
constexpr const NamedActivation* find_activation(std::string_view name) {
  for (const NamedActivation& known : kActivations) {
    if (known.name == name) return &known;
  }
  return nullptr;
}

struct ActivationInputs {
  const void* dy;            // [rows, width]; null for the activation itself
  const void* x;             // [rows, width], or [rows, 2 * width] of gate and linear
  const float* row_weights;  // [rows]; null for ones
  SourceType type;
  Activation activation;
  bool gated;
  int64_t rows;
  int64_t width;
};

// The cast of y [rows, width], or of dx, which has the shape of x. The kernel skips values or values_t where null.
struct ActivationArguments {
  ActivationInputs inputs;
  ScaleSource source;
  Fp8Type format;
  uint8_t* values;
  uint8_t* values_t;
  float* amax;
  float* scale;  // the scale that the kernel used
  // With dx only: its column sums, and y in FP8, transposed, by the scale that the forward used.
  ColumnSums sums;
  const float* activated_scale;
  Fp8Type activated_format;
  uint8_t* activated_t;  // [width, rows]
};

// The same by tiles. With dx only: its column sums, and y in FP8, transposed, with a scale for each 128 rows of a
// column of y, that is, tiles of 1 x 128 along the rows of activated_t.
struct ActivationByTileArguments {
  ActivationInputs inputs;
  TileCast cast;  // the cast of y [rows, width], or of dx
  ColumnSums sums;
  uint8_t* activated_t;       // [width, rows]
  float* activated_scales_t;  // [rows / 128, width]
};

cudaError_t launch_activation_quantize(const ActivationArguments& arguments, cudaStream_t stream);
cudaError_t launch_activation_backward_quantize(const ActivationArguments& arguments, cudaStream_t stream);
cudaError_t launch_activation_quantize_by_tile(const ActivationByTileArguments& arguments, cudaStream_t stream);
cudaError_t launch_activation_backward_quantize_by_tile(const ActivationByTileArguments& arguments,
                                                        cudaStream_t stream);

// The amax alone. Current scaling needs it before it can cast.
cudaError_t launch_activation_amax(const ActivationInputs& inputs, float* amax, cudaStream_t stream);
cudaError_t launch_activation_backward_amax(const ActivationInputs& inputs, float* amax, cudaStream_t stream);

extern XLA_FFI_Handler* const activation_quantize_handler;
extern XLA_FFI_Handler* const activation_backward_quantize_handler;
extern XLA_FFI_Handler* const activation_quantize_by_tile_handler;
extern XLA_FFI_Handler* const activation_backward_quantize_by_tile_handler;
extern XLA_FFI_Handler* const activation_amax_handler;
extern XLA_FFI_Handler* const activation_backward_amax_handler;

}  // namespace jax_fp8
