// amax = max|x|, NaN where there is one; 0 for an empty tensor. Current scaling asks for it before it quantizes. Of
// several tensors, one after the other, it is the largest of all.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtypes.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

struct AmaxArguments {
  const void* x;
  SourceType source;
  int64_t count;
  float* amax;
  bool further;  // than a first: the amax is of that one already
};

cudaError_t launch_amax(const AmaxArguments& arguments, cudaStream_t stream);

extern XLA_FFI_Handler* const amax_handler;

}  // namespace jax_fp8
