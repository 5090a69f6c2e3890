// A GEMM of few rows, for text generation: reading the weights bounds its time. On compute capability 9.0 warpgroups
// multiply E4M3 (wgmma). All else multiplies by the instruction of one warp (mma.sync), so it runs on every GPU that
// has FP8. On compute capability 9.0 or newer, the blocks of a cluster share a long k.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "activation.h"
#include "device/few_rows_gemm_plan.cuh"
#include "dtypes.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

extern XLA_FFI_Handler* const few_rows_gemm_handler;

}  // namespace jax_fp8

namespace jax_fp8::few_rows_gemm {

// All matrices are row-major: d[m, n] = alpha (a[m, k] a_scale) · (b[n, k] b_scale)ᵀ + bias[n] + c[m, n]. k and n are
// multiples of 16, and m is at most kMostRows. b is E4M3; a is E4M3 or bfloat16.
//
// With a preparation, a is normalized, rounded to bfloat16 and cast by a_scale first: in each block anew, or for
// warpgroups by a kernel before.
//
// Products are exact, and their sums are float32; but warpgroups keep some 13 bits of the sum of 128 products. Where
// tiles have scales, the sum of each 128 products is multiplied by its scales and then added.
struct Problem {
  int m, n, k;
  bool a_is_bfloat16;  // in the product
  Scaling scaling;  // kOne, and kLines of E4M3 or kSquares of bfloat16
  SourceType d;
  float alpha;
  int32_t config;  // the plan as `plan_by_digits` reads it; 0: a plan that suits the shape
  // a is bfloat16 then. More than kMostPreparedRows rows are prepared, activated and cast only with warpgroups.
  Preparation preparation = {};
  bool casts_d = false;  // from bfloat16 to E4M3, of few rows or by warpgroups
  // Of d, rounded before and after. Gated: b has the rows of the gate and then those of the linear part, d[m, n / 2] is
  // f(gate) * linear, and n is a multiple of 32.
  bool activates = false, gated = false;
  Activation activation = Activation::kGelu;
  // Where the second and the third part of d begin: columns, even, 0 without one. Each part is a matrix of its own, and
  // they lie one after another.
  int part_starts[2] = {0, 0};

  bool prepares() const { return preparation.normalizes || preparation.casts; }
  bool may_have_warpgroups() const {
    return !a_is_bfloat16 && (!preparation.normalizes || k <= kMostNormalizedDepth);
  }
  bool needs_warpgroups() const { return m > kMostPreparedRows && (prepares() || activates || casts_d); }
};

// a_scale is f32[], or of lines f32[ceil(k / 128), m]. b_scale is f32[], or of squares f32[ceil(n / 128),
// ceil(k / 128)]. The last dim of both is padded to a multiple of four. bias has the dtype of d, or bfloat16 where d is
// float32. It may be null, and so may c. d may be c: each cluster reads its elements of c before it writes them.
struct Operands {
  const void *a, *b;
  const float *a_scale, *b_scale;
  const void *bias, *c;
  void* d;
  const float *norm_scale = nullptr, *norm_bias = nullptr;  // f32[k] of LayerNorm; without a bias of RMSNorm
  void* rows = nullptr;            // [m, k] in E4M3: where a is cast to, if a kernel of its own does so
  const float* d_scale = nullptr;  // by which d is cast to E4M3, from bfloat16; else null
};

// Returns the reason of a failure, or an empty string.
std::string enqueue(const Problem& problem, Operands operands, cudaStream_t stream);

}  // namespace jax_fp8::few_rows_gemm
