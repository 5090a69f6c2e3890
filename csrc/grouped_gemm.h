// A product of FP8 matrices by the tensor cores of compute capability 9.0, of our own: as one product of operands
// scaled by tile, and of several groups of different sizes, which cuBLASLt does not make.
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
extern XLA_FFI_Handler* const grouped_gemm_weight_gradient_handler;  // groups of depth

}  // namespace jax_fp8

namespace jax_fp8::grouped_gemm {

// Row-major. Without groups d[m, n] = alpha a[m, k] · b[n, k]ᵀ + bias[n] + c[m, n]. With groups of rows, those of group
// g are multiplied by the g-th of the matrices b[groups, n, k], and rows of no group become zeros, but for bias and c.
// With groups of depth, d[groups, m, n] is the products a[m, from s to t] · b[n, from s to t]ᵀ, where s and t are the
// starts of a group and of the next.
struct Problem {
  Groups kind;
  ProductShape shape;
  Fp8Type a, b;
  bool by_tile;  // a by lines, b by squares; else one number each
  SourceType d;
  float alpha;
};

// Scales by tile are f32[ceil(k / 128), rows of a filled up] and f32[of each matrix b: ceil(n / 128), ceil(k / 128)
// filled up], to multiples of four. Null: no bias, no c, no groups.
struct Operands {
  const void *a, *b;
  const float *a_scale, *b_scale;
  const void *bias, *c;
  const int32_t* starts;
  void* d;
};

// What the kernel is passed.
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

// Whether the current device has these tensor cores.
bool is_available();

// What went wrong, empty when nothing did.
std::string enqueue(const Problem& problem, const Operands& operands, cudaStream_t stream);

}  // namespace jax_fp8::grouped_gemm
