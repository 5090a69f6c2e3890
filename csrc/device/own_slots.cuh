// Slots of 16 bytes in shared memory that belong to one thread. Nobody else looks, so no barrier guards them: they keep
// what registers cannot, and what a thread needs next arrives in them while it computes.
#pragma once

#include <cstdint>

#include "vector.cuh"

namespace jax_fp8 {

// Begins to bring 16 bytes to shared memory. Until they have arrived nothing is there.
template <typename T>
__device__ inline void fetch(T* shared, const T* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], %2;"
               :
               : "l"(__cvta_generic_to_shared(shared)), "l"(source), "n"(16)
               : "memory");
}

// Slot i of neighbouring threads lies side by side: whether read or written, a quarter of a warp meets every bank once.
template <int kThreads>
struct OwnSlots {
  uint4* slots;  // [count][kThreads]

  template <typename T>
  __device__ T* at(int slot) const {
    static_assert(sizeof(Vector<T>) == sizeof(uint4), "a slot holds a vector of 16-bit elements");
    return reinterpret_cast<T*>(slots + slot * kThreads + threadIdx.x);
  }

  template <typename T>
  __device__ void fetch(int slot, const T* source) const {
    jax_fp8::fetch(at<T>(slot), source);
  }
};

// Until all that this thread fetches has arrived.
__device__ inline void wait_for_fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// What a thread has begun to fetch since it last did this is a batch, which may be empty.
__device__ inline void end_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all batches of this thread but the last have arrived.
__device__ inline void wait_for_earlier_batches() { asm volatile("cp.async.wait_group %0;" ::"n"(1) : "memory"); }

}  // namespace jax_fp8
