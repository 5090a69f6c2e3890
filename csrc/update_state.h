// The end of an optimizer step for the state of delayed scaling:
// the amaxes of the step become the scales of the next one.
//
//     staged = max(history[0], recorded)
//     where 0 < staged < ∞: scale = clip(amax * 2**margin / fp8_max, 2**-126, 2**126)  history = 0, history[2:], staged
//     elsewhere:            scale and history stay as they were before anything was staged: history[0] = 0
//
// `amax` is the largest of the history, or what was staged. With `forget_outliers`, what is so large that this step's
// amax would fall below the smallest normal number of its format is none of the history.
//
// One launch serves all rows of all GEMMs, in place. There is little to read: what costs is to begin.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtypes.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

constexpr int kGemmRows = 3;  // input, kernel, output gradient

// The rows of one GEMM, or of several that are stacked.
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
  bool most_recent;  // amax is what was staged, else the largest of the history
  bool forget_outliers;
};

// What becomes a metric of the step. Both count rows.
struct StateCounts {
  uint32_t nonfinite;     // whose staged amax is infinite or NaN
  uint32_t underflowing;  // whose staged amax, at the scale of this step, was below the smallest normal number
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
