// Bytes of memory that a kernel asks for without waiting: they come to the L2 cache.
#pragma once

#include <cstdint>

namespace jax_fp8 {

// Address and count are multiples of 16. Before compute capability 9.0 there is no such instruction, and nothing is
// asked for.
__device__ inline void ask_for(const void* first, int64_t bytes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
               :
               : "l"(first), "r"(static_cast<uint32_t>(bytes))
               : "memory");
#endif
}

// The line of a few bytes.
__device__ inline void ask_for_line(const void* bytes) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(bytes) : "memory");
}

}  // namespace jax_fp8
