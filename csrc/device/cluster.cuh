// Clusters: blocks that run at the same time on neighbouring multiprocessors and can write into each other's shared
// memory (distributed shared memory).
//
// They need compute capability 9.0. The host must not launch a kernel with clusters from code compiled for an older
// one.
#pragma once

#include <cstdint>

namespace jax_fp8 {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A barrier of all threads of all blocks of the cluster. Each thread alternates: arrive, wait, arrive, wait. After the
// wait, a thread sees what any other wrote, to any block, before it arrived. Publishing those writes takes time, so
// there is an arrival without it too. A thread that has exited counts as arrived.
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

__device__ inline void arrive_at_cluster_with_nothing() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The address of the same shared variable in another block of the cluster. That block must have started, and must not
// exit before the access.
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
