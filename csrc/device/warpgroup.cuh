// Products of FP8 matrices on the tensor cores of compute capability 9.0 (wgmma). A warpgroup issues them: four warps,
// the first with an index that is a multiple of four. The tensor cores read both operands from shared memory. Rows are
// contiguous along k and swizzled, as tensor copies of boxes 128 bytes wide store them: of a row's eight pieces of 16
// bytes, piece p of row r lies at place p ^ (r % 8).
#pragma once

#include <cstdint>

#include "async_copy.cuh"
#include "fp8.cuh"

namespace jax_fp8 {

constexpr int kRowsOfWarpgroup = 64, kColumnsOfProduct = 128, kDepthOfProduct = 32;
constexpr int kSwizzleBytes = 128;
constexpr int kProducts = kRowsOfWarpgroup * kColumnsOfProduct / 128;  // float32 sums that a thread holds

// A thread's sums of a product of 64 rows by 128 columns of a warpgroup. Thread t of warp w has row 16 w + t / 4 in
// elements 4 j and 4 j + 1, with columns 8 j + 2 (t % 4) and the next, and the same columns of row 16 w + t / 4 + 8 in
// elements 4 j + 2 and 4 j + 3.
struct Products {
  float of[kProducts];
};

// The descriptor of rows of 128 bytes in shared memory, which start at a multiple of 1,024. It holds the address and
// the stride from eight rows to the next eight, 1,024 bytes, both in units of 16 bytes, and the kind of swizzle. A step
// of 32 elements along k adds 2 to it.
__device__ inline uint64_t rows_in_shared(const void* pointer) {
  constexpr uint64_t kStride = uint64_t{1024 >> 4} << 32, kUnused = uint64_t{1} << 16, kSwizzled = uint64_t{1} << 62;
  return (shared_address(pointer) & 0x3ffff) >> 4 | kUnused | kStride | kSwizzled;
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kLeft committed groups of products are still running.
template <int kLeft>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Keeps the compiler from reading or moving these registers before this line: the tensor cores write them
// asynchronously.
__device__ inline void hold(Products& products) {
#pragma unroll
  for (int i = 0; i < kProducts; ++i) asm volatile("" : "+f"(products.of[i])::"memory");
}

#define JAX_FP8_FOUR(i) "+f"(d.of[i]), "+f"(d.of[i + 1]), "+f"(d.of[i + 2]), "+f"(d.of[i + 3])
#define JAX_FP8_SIXTEEN(i) JAX_FP8_FOUR(i), JAX_FP8_FOUR(i + 4), JAX_FP8_FOUR(i + 8), JAX_FP8_FOUR(i + 12)
#define JAX_FP8_MULTIPLY(types)                                                                                        \
  asm volatile(                                                                                                        \
      "{\n"                                                                                                            \
      ".reg .pred adds;\n"                                                                                             \
      "setp.ne.b32 adds, %66, 0;\n"                                                                                    \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." types                                                             \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                               \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                               \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, adds, %67, %68;\n"   \
      "}"                                                                                                              \
      : JAX_FP8_SIXTEEN(0), JAX_FP8_SIXTEEN(16), JAX_FP8_SIXTEEN(32), JAX_FP8_SIXTEEN(48)                              \
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(1), "n"(1))

// d = a bᵀ, or d += a bᵀ if `adds`, where a has 64 x 32 elements and b 128 x 32.
template <Fp8Type kA, Fp8Type kB>
__device__ inline void multiply(Products& d, uint64_t a, uint64_t b, bool adds) {
  static_assert(kA == Fp8Type::kE4M3 || kB == Fp8Type::kE4M3, "the tensor cores do not multiply E5M2 by E5M2");
  if constexpr (kA == Fp8Type::kE5M2) {
    JAX_FP8_MULTIPLY("e5m2.e4m3");
  } else if constexpr (kB == Fp8Type::kE5M2) {
    JAX_FP8_MULTIPLY("e4m3.e5m2");
  } else {
    JAX_FP8_MULTIPLY("e4m3.e4m3");
  }
}

// The same of E4M3 by few rows of b: 8, 16, 32 or 64 of them.
template <int kColumns>
struct FewColumns {
  float of[kColumns / 2];
};

template <int kColumns>
__device__ inline void hold(FewColumns<kColumns>& products) {
#pragma unroll
  for (float& product : products.of) asm volatile("" : "+f"(product)::"memory");
}

__device__ inline void multiply(FewColumns<8>& d, uint64_t a, uint64_t b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, adds, %7, %8;\n"
      "}"
      : JAX_FP8_FOUR(0)
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(1), "n"(1));
}

__device__ inline void multiply(FewColumns<16>& d, uint64_t a, uint64_t b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3"
      " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, adds, %11, %12;\n"
      "}"
      : JAX_FP8_FOUR(0), JAX_FP8_FOUR(4)
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(1), "n"(1));
}

__device__ inline void multiply(FewColumns<32>& d, uint64_t a, uint64_t b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, adds, %19, %20;\n"
      "}"
      : JAX_FP8_SIXTEEN(0)
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(1), "n"(1));
}

__device__ inline void multiply(FewColumns<64>& d, uint64_t a, uint64_t b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, adds, %35, %36;\n"
      "}"
      : JAX_FP8_SIXTEEN(0), JAX_FP8_SIXTEEN(16)
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(1), "n"(1));
}

#undef JAX_FP8_MULTIPLY
#undef JAX_FP8_SIXTEEN
#undef JAX_FP8_FOUR

}  // namespace jax_fp8
