// values = saturate(x * (1 / scale)) in FP8, with amax = max|x| from the same pass, and the transpose too when it is asked for.
//
// Hopper's FP8 GEMM wants both operands contiguous along the contracting dim, so most tensors are needed in both
// orientations. Reading the source once for values, transpose and amax is what makes the cast cheap.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtypes.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

// What the scale is made of: attributes of both operations. Reading one of several scales, or turning an amax into a scale, is
// work of nanoseconds, for which a kernel of its own would cost microseconds.
struct ScaleOrigin {
  int32_t row;         // the element of the source
  bool from_amax;      // whether it is the amax of x, to be scaled by the rest, or already the scale
  int32_t margin;      // powers of two of headroom
  float amax_epsilon;  // smallest amax
  bool power_2_scale;  // rounded up to a power of two
};

struct QuantizeArguments {
  const void* x;  // [rows, cols]
  SourceType x_type;
  const float* source;  // [] or [scales]
  ScaleOrigin origin;
  Fp8Type format;
  uint8_t* values;    // [rows, cols]
  uint8_t* values_t;  // [cols, rows]; unused by launch_quantize
  float* amax;
  float* scale;  // the one used: x ≈ values * scale
  int64_t rows;
  int64_t cols;
};

cudaError_t launch_quantize(const QuantizeArguments& arguments, cudaStream_t stream);
cudaError_t launch_quantize_transpose(const QuantizeArguments& arguments, cudaStream_t stream);

extern XLA_FFI_Handler* const quantize_handler;
extern XLA_FFI_Handler* const quantize_transpose_handler;

}  // namespace jax_fp8
