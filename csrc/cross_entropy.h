// The cross-entropy of each row of logits, and its gradient, which the kernel may write over the logits.
//
//     lse = log sum exp logits        loss = share (lse - logits[label] + z_loss lse²)
//     gradient = share (exp(logits - lse) (1 + 2 z_loss lse) - onehot(label))
//
// `share` is the weight of a row in the loss, such as 1 / tokens for a mean. The logits are the largest array of a
// training step, so the kernel reads them once and writes the gradient once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtypes.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

struct CrossEntropyArguments {
  const void* logits;  // [rows, vocab]
  SourceType type;
  const int32_t* labels;  // [rows]; a label outside [0, vocab) makes the loss and the gradient of its row NaN
  const float* shares;    // [rows]
  float z_loss;
  void* gradient;  // [rows, vocab]; may be the same address as `logits`
  float* loss;     // [rows]
  float* lse;      // [rows]
  int64_t rows;
  int64_t vocab;  // at least 1
};

cudaError_t launch_cross_entropy(const CrossEntropyArguments& arguments, cudaStream_t stream);

extern XLA_FFI_Handler* const cross_entropy_handler;

}  // namespace jax_fp8
