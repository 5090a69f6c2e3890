// Programmatic dependent launch: a kernel may begin before the kernel before it on the stream has ended.
//
// A kernel that is launched so (Begins::kEarly) must wait before it reads what a kernel before has written, and before
// it writes what one may still read. Weights it may ask for at once. When its wait ends, all kernels before it have:
// each of them waited too. Before compute capability 9.0 no kernel begins early.
#pragma once

namespace jax_fp8 {

// Every thread must call it.
__device__ inline void wait_for_kernels_before() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel begins when all blocks have called it, or have ended.
__device__ inline void let_next_kernel_begin() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace jax_fp8
