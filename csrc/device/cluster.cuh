// Blocks that run at the same time on neighbouring multiprocessors and write into one another's shared memory:
// a cluster.
//
// Compute capability 9.0 has them. A kernel that uses them must not be launched from code for an older one.
#pragma once

#include <cstdint>

namespace jax_fp8 {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A barrier of all threads of all blocks: arrive, wait, arrive, wait. What a thread has written before it arrives, to
// any block, all see that have waited; publishing that takes time, so there is a way to arrive without.
// A thread that has ended has arrived.
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

__device__ inline void arrive_at_cluster_with_nothing() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Where a variable in shared memory is in another block of the cluster. That block must have begun, and must not end
// before it is used.
template <typename T>
__device__ inline T* in_block(T* shared, int block) {
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(shared)), "r"(block));
  return reinterpret_cast<T*>(address);
}

#else

__device__ inline void arrive_at_cluster() { __trap(); }

__device__ inline void arrive_at_cluster_with_nothing() { __trap(); }

__device__ inline void wait_for_cluster() { __trap(); }

template <typename T>
__device__ inline T* in_block(T* shared, int) {
  return shared;
}

#endif

}  // namespace jax_fp8
