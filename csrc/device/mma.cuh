// Products of one warp on the tensor cores (mma.sync), which every GPU of compute capability 8.0 or newer has:
//
//     sums[16, 8] += a[16, 16] · b[16, 8]
//
// The elements lie in the registers of the 32 lanes. Lane 4 g + t has, of pairs of neighbours along the contracted dim,
//
//     a     row g:      the pairs from 2 t and from 2 t + 8 on    words 0 and 2
//           row g + 8:  the same                                  words 1 and 3
//     b     column g:   the same                                  words 0 and 1
//     sums  row g:      columns 2 t and 2 t + 1                   floats 0 and 1
//           row g + 8:  the same                                  floats 2 and 3
//
// The order of the contracted dim is free, as long as a and b have the same.
#pragma once

#include <cstdint>

#include "vector.cuh"

namespace jax_fp8 {

__device__ inline void multiply_add(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Float16) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]),
        "f"(sums[3]));
}

__device__ inline void multiply_add(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], BFloat16) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]),
        "f"(sums[3]));
}

// Widens four neighbouring E4M3 values to two pairs, without rounding; a NaN stays a NaN. To float16 it is one
// instruction for a pair.
__device__ inline void widen(uint32_t four, uint32_t& first, uint32_t& second, Float16) {
  uint16_t low, high;  // by an instruction, since the compiler would shift
  asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(four));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(first) : "h"(low));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(second) : "h"(high));
}

// The upper halves of floats that have at most 8 significant bits.
__device__ inline uint32_t upper_halves(uint32_t pair_of_float16) {
  const float first = to_float(Float16{static_cast<uint16_t>(pair_of_float16)});
  const float second = to_float(Float16{static_cast<uint16_t>(pair_of_float16 >> 16)});
  return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
}

// To bfloat16 it is four for a pair. Shifting the bits and multiplying by a power of two would take as many, and make
// 480 of a NaN.
__device__ inline void widen(uint32_t four, uint32_t& first, uint32_t& second, BFloat16) {
  uint32_t halves[2];
  widen(four, halves[0], halves[1], Float16{});
  first = upper_halves(halves[0]), second = upper_halves(halves[1]);
}

}  // namespace jax_fp8
