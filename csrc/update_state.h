// The update of delayed scaling's state at the end of an optimizer step: the amaxes of the step become the scales of
// the next one.
//
//     staged = max(history[0], recorded)
//     where 0 < staged < ∞: scale = clip(amax * 2**margin / fp8_max, 2**-126, 2**126)  history = 0, history[2:], staged
//     elsewhere:            scale and history stay as they were before anything was staged: history[0] = 0
//
// `amax` is the largest of the history, or `staged` itself. `forget_outliers` ignores those amaxes of the history at
// whose scale this step's amax would be below the smallest normal number of its format.
//
// One launch updates all rows of all GEMMs, in place. There is little to read: launches and latency are the cost.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtypes.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

constexpr int kGemmRows = 3;  // input, kernel, output gradient

// The rows of one GEMM, or of several GEMMs in one stacked array.
struct StateLeaf {
  float* scale;    // [rows]
  float* history;  // [rows, length]
  int64_t rows;    // a multiple of kGemmRows
  int64_t length;  // at least 1
};

struct UpdateRule {
  Fp8Type forward;   // of input and kernel
  Fp8Type backward;  // of output gradients
  float headroom;    // 2**margin
  bool most_recent;  // whether amax is `staged`; else it is the largest of the history
  bool forget_outliers;
};

// Metrics of the step: numbers of rows.
struct StateCounts {
  uint32_t nonfinite;     // rows whose staged amax is infinite or NaN
  uint32_t underflowing;  // rows whose staged amax, divided by this step's scale, is below the smallest normal number
};

struct UpdateStateArguments {
  const StateLeaf* leaves;  // on the host
  int leaf_count;
  const float* recorded;  // [rows of all leaves]
  StateCounts* counts;
  UpdateRule rule;
};

cudaError_t launch_update_state(const UpdateStateArguments& arguments, cudaStream_t stream);

extern XLA_FFI_Handler* const update_state_handler;

}  // namespace jax_fp8
