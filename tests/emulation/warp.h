// Barriers, and the operations of a warp's lanes and of a cluster's blocks.
#pragma once

#include "fibers.h"
#include "instructions.h"
#include "intrinsics.h"

using emulation::Place;

inline void __syncthreads(Place place = Place::current()) { emulation::block_barrier(place); }

[[noreturn]] inline void __trap() { emulation::fail("a kernel for another device"); }

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, Place place = Place::current()) {
  emulation::warp_exchange("__syncwarp", mask, 0, place);
}

template <typename T>
T emulation_shuffle(const char* what, unsigned mask, T value, int lane, Place place) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t given = 0;
  memcpy(&given, &value, sizeof(T));
  memcpy(&value, &emulation::warp_exchange(what, mask, given, place)[lane], sizeof(T));
  return value;
}

inline int emulation_lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % emulation::kLanes;
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, Place place = Place::current()) {
  const int first = emulation_lane() / width * width;
  return emulation_shuffle("__shfl_sync", mask, value, first + (source & (width - 1)), place);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, Place place = Place::current()) {
  const int lane = emulation_lane(), other = lane ^ bits;
  return emulation_shuffle("__shfl_xor_sync", mask, value, other < (lane / width + 1) * width ? other : lane, place);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, Place place = Place::current()) {
  const int lane = emulation_lane(), other = lane + static_cast<int>(by);
  return emulation_shuffle("__shfl_down_sync", mask, value, other < (lane / width + 1) * width ? other : lane, place);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, Place place = Place::current()) {
  const int lane = emulation_lane(), other = lane - static_cast<int>(by);
  return emulation_shuffle("__shfl_up_sync", mask, value, other >= lane / width * width ? other : lane, place);
}

template <typename T, typename Operation>
T emulation_reduce(const char* what, unsigned mask, T value, Place place, Operation operation) {
  const uint64_t* lanes = emulation::warp_exchange(what, mask, static_cast<uint64_t>(value), place);
  T result = value;  // this lane counts twice, which matters only for a sum
  for (int i = 0; i < emulation::kLanes; ++i) {
    if (mask >> i & 1) result = operation(result, static_cast<T>(lanes[i]));
  }
  return result;
}

template <typename T>
T __reduce_max_sync(unsigned mask, T value, Place place = Place::current()) {
  return emulation_reduce("__reduce_max_sync", mask, value, place, [](T a, T b) { return std::max(a, b); });
}

template <typename T>
T __reduce_min_sync(unsigned mask, T value, Place place = Place::current()) {
  return emulation_reduce("__reduce_min_sync", mask, value, place, [](T a, T b) { return std::min(a, b); });
}

template <typename T>
T __reduce_add_sync(unsigned mask, T value, Place place = Place::current()) {
  const auto add = [](T a, T b) { return static_cast<T>(a + b); };
  return static_cast<T>(emulation_reduce("__reduce_add_sync", mask, value, place, add) - value);
}

inline unsigned __reduce_or_sync(unsigned mask, unsigned value, Place place = Place::current()) {
  return emulation_reduce("__reduce_or_sync", mask, value, place, [](unsigned a, unsigned b) { return a | b; });
}

inline unsigned __ballot_sync(unsigned mask, int predicate, Place place = Place::current()) {
  const uint64_t* lanes = emulation::warp_exchange("__ballot_sync", mask, predicate != 0, place);
  unsigned ballot = 0;
  for (int i = 0; i < emulation::kLanes; ++i) ballot |= (mask >> i & 1) != 0 && lanes[i] != 0 ? 1u << i : 0u;
  return ballot;
}

inline int __any_sync(unsigned mask, int predicate, Place place = Place::current()) {
  return __ballot_sync(mask, predicate, place) != 0;
}

inline int __all_sync(unsigned mask, int predicate, Place place = Place::current()) {
  return __ballot_sync(mask, predicate, place) == mask;
}

// ---- instructions for which CUDA has no intrinsics: clusters, products of a warp ------------------------------------

namespace emulation {

// d = a b + c: 16 x 8 sums of 16 products each. d, a, b and c are this lane's elements.
void multiply_in_warp(Format format, float* const (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                      const float (&c)[4], Place place);

}  // namespace emulation

namespace ptx {

inline void barrier_cluster_arrive_release(Place place = Place::current()) { emulation::arrive_at_cluster(place); }
inline void barrier_cluster_arrive_relaxed(Place place = Place::current()) { emulation::arrive_at_cluster(place); }
inline void barrier_cluster_wait_acquire(Place place = Place::current()) { emulation::wait_for_cluster(place); }

inline void mapa_u64(uint64_t& d, uint64_t address, unsigned rank, Place place = Place::current()) {
  d = reinterpret_cast<uint64_t>(emulation::in_block(reinterpret_cast<void*>(address), rank, place));
}

#define EMULATION_PRODUCT(name, format)                                                                               \
  inline void name(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,    \
                   uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3, Place place = Place::current()) { \
    emulation::multiply_in_warp(format, {&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}, place);   \
  }

EMULATION_PRODUCT(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, emulation::kFloat16)
EMULATION_PRODUCT(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, emulation::kBFloat16)
#undef EMULATION_PRODUCT

}  // namespace ptx
