// Four neighbours in a row of bias, c or d of a GEMM of few rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../dtypes.h"
#include "vector.cuh"

namespace jax_fp8::few_rows_gemm {

// As they lie in memory. Their dtype is known at run time: code for each would take longer to arrive at a
// multiprocessor than the choice takes.
struct Four {
  uint32_t words[4];  // of 16-bit types the first two words alone
};

__device__ inline Four load_four(const void* source, int64_t four, SourceType type) {
  if (type == SourceType::kFloat32) {
    const uint4 words = static_cast<const uint4*>(source)[four];
    return {{words.x, words.y, words.z, words.w}};
  }
  const uint2 words = static_cast<const uint2*>(source)[four];
  return {{words.x, words.y}};
}

__device__ inline float4 floats_of(const Four& four, SourceType type) {
  if (type == SourceType::kFloat32) {
    return {__uint_as_float(four.words[0]), __uint_as_float(four.words[1]), __uint_as_float(four.words[2]),
            __uint_as_float(four.words[3])};
  }
  float x[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (type == SourceType::kBFloat16) {
      unpack(four.words[i], x + 2 * i, BFloat16{});
    } else {
      unpack(four.words[i], x + 2 * i, Float16{});
    }
  }
  return {x[0], x[1], x[2], x[3]};
}

// Rounds.
__device__ inline Four four_of(const float4& x, SourceType type) {
  if (type == SourceType::kFloat32) {
    return {{__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)}};
  }
  if (type == SourceType::kBFloat16) return {{pack(x.x, x.y, BFloat16{}), pack(x.z, x.w, BFloat16{})}};
  return {{pack(x.x, x.y, Float16{}), pack(x.z, x.w, Float16{})}};
}

__device__ inline void store_four(void* target, int64_t four, const Four& x, SourceType type) {
  if (type == SourceType::kFloat32) {
    static_cast<uint4*>(target)[four] = make_uint4(x.words[0], x.words[1], x.words[2], x.words[3]);
  } else {
    static_cast<uint2*>(target)[four] = make_uint2(x.words[0], x.words[1]);
  }
}

__device__ inline float4 add(const float4& one, const float4& other) {
  return {__fadd_rn(one.x, other.x), __fadd_rn(one.y, other.y), __fadd_rn(one.z, other.z), __fadd_rn(one.w, other.w)};
}

__device__ inline float4 multiply(const float4& x, float factor) {
  return {__fmul_rn(x.x, factor), __fmul_rn(x.y, factor), __fmul_rn(x.z, factor), __fmul_rn(x.w, factor)};
}

}  // namespace jax_fp8::few_rows_gemm
