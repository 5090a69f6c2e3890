// What moves a box of a matrix between global and shared memory while threads do other things, what a thread sends to
// another block, and how threads learn that it has arrived: the tensor copies of compute capability 9.0 and its
// barriers in shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace jax_fp8 {

// Shared memory as these instructions address it.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- barriers ------------------------------------------------------------------------------------------------------

// Counts arrivals, and bytes that are announced and then copied. Each time all have come its phase ends; who waits
// names the phase by its parity: 0 for the first, then 1, and so on. A wait for parity 1 of a new barrier is over at
// once.
struct Barrier {
  uint64_t state;
};

__device__ inline void start(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// After `start`, for copies and for the other block of the cluster.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive_and_expect(Barrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// At the barrier of this place in a block of the cluster. What it says is that this thread has read shared memory; it
// publishes nothing that the other block would read, which would be waiting for all of this thread's loads and stores.
__device__ inline void arrive_in_block(Barrier& barrier, int block) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(&barrier)), "r"(block));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

// Sends two words to this place in a block of the cluster, where `barrier` gets eight bytes. That publishes nothing
// else, and so waits for nothing.
template <typename T>
__device__ inline void send(const T& pair, T* shared, Barrier& barrier, int block) {
  static_assert(sizeof(T) == 8 && alignof(T) == 8);
  const auto* words = reinterpret_cast<const uint32_t*>(&pair);
  uint32_t there, barrier_there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared)), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier_there) : "r"(shared_address(&barrier)), "r"(block));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
               :
               : "r"(there), "r"(words[0]), "r"(words[1]), "r"(barrier_there)
               : "memory");
}

// Whether the phase has ended; the hardware waits for a while before it says no.
__device__ inline bool is_over(Barrier& barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n"
      ".reg .pred is_over;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 is_over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, is_over;\n"
      "}"
      : "=r"(over)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return over != 0;
}

__device__ inline void wait(Barrier& barrier, uint32_t parity) {
  while (!is_over(barrier, parity)) {
  }
}

// ---- copies --------------------------------------------------------------------------------------------------------

// The first element of a box: of a row, of the rows, of the matrices.
struct Corner {
  int column, row, matrix;
};

// Into this block; `barrier` gets the bytes. What lies outside of the matrix arrives as zeros, and counts.
__device__ inline void load_box(const CUtensorMap& map, Corner corner, void* shared, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      :
      : "r"(shared_address(shared)), "l"(&map), "r"(corner.column), "r"(corner.row), "r"(corner.matrix),
        "r"(shared_address(&barrier))
      : "memory");
}

// Into the same place of each block of the cluster whose bit is set, and to the barrier that it has there.
__device__ inline void load_box(const CUtensorMap& map, Corner corner, void* shared, Barrier& barrier,
                                uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;"
      :
      : "r"(shared_address(shared)), "l"(&map), "r"(corner.column), "r"(corner.row), "r"(corner.matrix),
        "r"(shared_address(&barrier)), "h"(blocks)
      : "memory");
}

// What threads have written to shared memory becomes visible to copies that are issued after a barrier of these
// threads.
__device__ inline void publish_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What lies outside of the matrix is not written.
__device__ inline void store_box(const CUtensorMap& map, Corner corner, const void* shared) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];"
               :
               : "l"(&map), "r"(corner.column), "r"(corner.row), "r"(corner.matrix), "r"(shared_address(shared))
               : "memory");
}

__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until the stores of this thread have read shared memory; they may still be writing.
__device__ inline void wait_for_stores_to_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(0) : "memory");
}

__device__ inline void wait_for_stores() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(0) : "memory"); }

}  // namespace jax_fp8
