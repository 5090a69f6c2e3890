// Asynchronous instructions of compute capability 9.0. Tensor copies (TMA) move a box of a matrix between global and
// shared memory while threads do other work. A thread can send words to another block of its cluster. Barriers in
// shared memory (mbarrier) tell threads that the bytes have arrived.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace jax_fp8 {

// The 32-bit address within shared memory that these instructions take.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- barriers ------------------------------------------------------------------------------------------------------

// Counts arrivals, and the bytes that a thread has announced and copies bring. When all have come, the phase ends and
// the next begins. A waiting thread names the phase by its parity: 0 for the first phase, then 1, then 0 again. A wait
// for parity 1 of a new barrier returns at once.
struct Barrier {
  uint64_t state;
};

__device__ inline void start(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// To be called after `start`: makes the barriers visible to copies and to the other blocks of the cluster.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive_and_expect(Barrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Arrives at the same barrier in another block of the cluster. The arrival says that this thread has read its shared
// memory. It has no release at cluster scope and publishes no data: that would wait for all of this thread's loads and
// stores.
__device__ inline void arrive_in_block(Barrier& barrier, int block) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(&barrier)), "r"(block));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

// Sends two or four words to the same address in another block of the cluster, and counts their bytes at that block's
// `barrier`. It publishes nothing else, and so waits for nothing.
template <typename T>
__device__ inline void send(const T& value, T* shared, Barrier& barrier, int block) {
  static_assert((sizeof(T) == 8 || sizeof(T) == 16) && alignof(T) == sizeof(T));
  const auto* words = reinterpret_cast<const uint32_t*>(&value);
  uint32_t there, barrier_there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared)), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier_there) : "r"(shared_address(&barrier)), "r"(block));
  if constexpr (sizeof(T) == 16) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 :
                 : "r"(there), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier_there)
                 : "memory");
  } else {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
                 :
                 : "r"(there), "r"(words[0]), "r"(words[1]), "r"(barrier_there)
                 : "memory");
  }
}

// Whether the phase has ended. The hardware may wait for a while before it answers no.
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

// The coordinates of a box's first element, innermost dim first.
struct Corner {
  int column, row, matrix;
};

// Copies a box to this block, and counts its bytes at `barrier`. Elements outside of the matrix arrive as zeros and
// count too.
__device__ inline void load_box(const CUtensorMap& map, Corner corner, void* shared, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      :
      : "r"(shared_address(shared)), "l"(&map), "r"(corner.column), "r"(corner.row), "r"(corner.matrix),
        "r"(shared_address(&barrier))
      : "memory");
}

// The coordinates of a box of chunks (tensor_map.h), innermost dim first.
struct ChunkCorner {
  int column, row, matrix, chunk;
};

__device__ inline void load_chunks(const CUtensorMap& map, ChunkCorner corner, void* shared, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
      :
      : "r"(shared_address(shared)), "l"(&map), "r"(corner.column), "r"(corner.row), "r"(corner.matrix),
        "r"(corner.chunk), "r"(shared_address(&barrier))
      : "memory");
}

// Copies a box to the same address in each block of the cluster whose bit is set (multicast), and counts its bytes at
// the same barrier in each of them.
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

// Makes what this thread has written to shared memory visible to copies. Tensor copies access memory by another path
// (the async proxy), so each writer calls this before the barrier after which one thread issues the copy.
__device__ inline void publish_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies a box to global memory. Elements outside of the matrix are not written.
__device__ inline void store_box(const CUtensorMap& map, Corner corner, const void* shared) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];"
               :
               : "l"(&map), "r"(corner.column), "r"(corner.row), "r"(corner.matrix), "r"(shared_address(shared))
               : "memory");
}

__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the stores of this thread have read shared memory, which may then be overwritten. Their writes to global
// memory may still be under way.
__device__ inline void wait_for_stores_to_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(0) : "memory");
}

__device__ inline void wait_for_stores() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(0) : "memory"); }

}  // namespace jax_fp8
