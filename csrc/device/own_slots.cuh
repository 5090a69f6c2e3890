// Slots of 16 bytes in shared memory that belong to one thread. Nobody else looks, so no barrier guards them: they keep
// what registers cannot, and what a thread needs next arrives in them while it computes.
#pragma once

#include <cstdint>

#include "vector.cuh"

namespace jax_fp8 {

// Slot i of neighbouring threads lies side by side: whether read or written, a quarter of a warp meets every bank once.
template <int kThreads>
struct OwnSlots {
  uint4* slots;  // [count][kThreads]

  template <typename T>
  __device__ T* at(int slot) const {
    static_assert(sizeof(Vector<T>) == sizeof(uint4), "a slot holds a vector of 16-bit elements");
    return reinterpret_cast<T*>(slots + slot * kThreads + threadIdx.x);
  }

  // Begins to bring a vector. Until it has arrived the slot holds nothing.
  template <typename T>
  __device__ void fetch(int slot, const T* source) const {
    asm volatile("cp.async.cg.shared.global [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_shared(at<T>(slot))), "l"(source), "n"(16)
                 : "memory");
  }
};

// Until all that this thread fetches has arrived.
__device__ inline void wait_for_fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace jax_fp8
