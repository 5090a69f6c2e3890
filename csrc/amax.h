// amax = max|x|. It is NaN if x has a NaN, and 0 for an empty tensor. Current scaling computes it before the cast.
// Given several tensors, the handler reads one after the other and returns the largest amax of all.
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
  bool further;  // not the first tensor of its call: amax holds that of the tensors before, and is not cleared
};

cudaError_t launch_amax(const AmaxArguments& arguments, cudaStream_t stream);

extern XLA_FFI_Handler* const amax_handler;

}  // namespace jax_fp8
