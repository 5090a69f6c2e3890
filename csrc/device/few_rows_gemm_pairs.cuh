// Pairs of neighbours in a row of bias, c or d of a GEMM of few rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../dtypes.h"
#include "vector.cuh"

namespace jax_fp8::few_rows_gemm {

// Two neighbours, as they lie in memory. Their dtype is known at run time: code for each would take longer to
// arrive at a multiprocessor than the choice takes.
struct Pair {
  uint32_t words[2];  // of 16-bit types the first word alone
};

__device__ inline Pair read_pair(const void* source, int64_t pair, SourceType type) {
  if (type != SourceType::kFloat32) return {static_cast<const uint32_t*>(source)[pair], 0};
  const uint2 two = static_cast<const uint2*>(source)[pair];
  return {two.x, two.y};
}

__device__ inline float2 floats_of(const Pair& pair, SourceType type) {
  if (type == SourceType::kFloat32) return {__uint_as_float(pair.words[0]), __uint_as_float(pair.words[1])};
  float two[2];
  if (type == SourceType::kBFloat16) {
    unpack(pair.words[0], two, BFloat16{});
  } else {
    unpack(pair.words[0], two, Float16{});
  }
  return {two[0], two[1]};
}

// Rounds.
__device__ inline Pair pair_of(float2 value, SourceType type) {
  if (type == SourceType::kFloat32) return {__float_as_uint(value.x), __float_as_uint(value.y)};
  return {type == SourceType::kBFloat16 ? pack(value.x, value.y, BFloat16{}) : pack(value.x, value.y, Float16{}), 0};
}

__device__ inline void write_pair(void* target, int64_t pair, const Pair& value, SourceType type) {
  if (type == SourceType::kFloat32) {
    static_cast<uint2*>(target)[pair] = make_uint2(value.words[0], value.words[1]);
  } else {
    static_cast<uint32_t*>(target)[pair] = value.words[0];
  }
}

__device__ inline float2 add(float2 one, float2 other) {
  return {__fadd_rn(one.x, other.x), __fadd_rn(one.y, other.y)};
}

}  // namespace jax_fp8::few_rows_gemm
