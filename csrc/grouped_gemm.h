// Our own GEMM of FP8 matrices for the tensor cores of compute capability 9.0. It multiplies operands scaled by tile as
// one product, and several groups of different sizes in one launch, which cuBLASLt does not offer.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "device/grouped_gemm_tiles.cuh"
#include "dtypes.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

extern XLA_FFI_Handler* const grouped_gemm_handler;                  // groups of rows
extern XLA_FFI_Handler* const grouped_gemm_weight_gradient_handler;  // groups along the contracted dim

}  // namespace jax_fp8

namespace jax_fp8::grouped_gemm {

// All matrices are row-major. Without groups, d[m, n] = alpha a[m, k] · b[n, k]ᵀ + bias[n] + c[m, n].
//
// With groups of rows, the rows of a in group g are multiplied by the g-th of the matrices b[groups, n, k]. Rows of no
// group become zeros, plus bias and c. The matrices of b may lie side by side in memory, as [n, groups, k].
//
// With groups of depth, d[groups, m, n] holds one product for each group: a[m, s:t] · b[n, s:t]ᵀ, where s is the start
// of the group and t the start of the next.
struct Problem {
  Groups kind;
  ProductShape shape;
  Fp8Type a, b;
  bool by_tile;  // one scale for each line of a and each square of b; else one scale for each operand
  SourceType d;
  float alpha;
  bool side_by_side = false;  // the matrices of b
};

// By tile, a_scale is f32[ceil(k / 128), rows of a], and b_scale is f32[ceil(n / 128), ceil(k / 128)] for each matrix
// of b. The last dim of both is padded to a multiple of four. bias, c and starts are null without bias, c and groups.
struct Operands {
  const void *a, *b;
  const float *a_scale, *b_scale;
  const void *bias, *c;
  const int32_t* starts;
  void* d;
};

// The kernel's parameter. The tensor maps tell the copies of Hopper (TMA) where a matrix lies and how to swizzle it.
struct Arguments {
  CUtensorMap a, b, c, d;
  ProductShape shape;
  const float *a_scale, *b_scale;
  int64_t a_scale_row, b_scale_row, b_scale_matrix;  // elements from one row of the scales to the next
  const void* bias;
  const int32_t* starts;
  float alpha;
  bool has_c;
};

// Whether the current device has compute capability 9.0, for whose tensor cores the kernel is written.
bool is_available();

// Returns the reason of a failure, or an empty string.
std::string enqueue(const Problem& problem, const Operands& operands, cudaStream_t stream);

}  // namespace jax_fp8::grouped_gemm
