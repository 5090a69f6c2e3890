// Slots of 16 bytes in shared memory that belong to one thread. No other thread reads them, so they need no barrier.
// They hold what does not fit in registers, and receive what the thread needs next (cp.async) while it computes.
#pragma once

#include <cstdint>

#include "vector.cuh"

namespace jax_fp8 {

// Starts an asynchronous copy of 16 bytes to shared memory. Wait for it before you read them.
template <typename T>
__device__ inline void fetch(T* shared, const T* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], %2;"
               :
               : "l"(__cvta_generic_to_shared(shared)), "l"(source), "n"(16)
               : "memory");
}

// The slots i of neighbouring threads lie side by side. So a quarter of a warp, 8 threads with 16 bytes each, accesses
// each of the 32 banks once.
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

// Waits until all copies of this thread have arrived.
__device__ inline void wait_for_fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Ends a batch: the copies that this thread has started since the last call. A batch may be empty.
__device__ inline void end_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all batches of this thread but the latest have arrived.
__device__ inline void wait_for_earlier_batches() { asm volatile("cp.async.wait_group %0;" ::"n"(1) : "memory"); }

}  // namespace jax_fp8
