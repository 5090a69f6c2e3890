// The asynchronous instructions of compute capability 9.0: copies of boxes, products of a warpgroup, and the barriers
// at which threads wait for them.
#pragma once

#include <array>
#include <tuple>

#include "cuda.h"
#include "fibers.h"
#include "instructions.h"
#include "warp.h"

namespace emulation {

// A 32-bit address in shared memory. Its highest bits name a block of the cluster, or this block.
uint32_t shared_address(const void* pointer);
void* in_shared(uint32_t address, Place place);
uint32_t address_in_block(uint32_t address, size_t rank, Place place);

void begin_barrier(uint32_t barrier, int arrivals, Place place);
void arrive(uint32_t barrier, int64_t bytes, Place place);
// Returns false now and then before the phase has ended, as the hardware may.
bool wait_for_phase(uint32_t barrier, uint32_t parity, Place place);

// A barrier (bar.sync) of some threads of this block, in whole warps.
void numbered_barrier(int number, int threads, Place place);

struct Box {
  const CUtensorMap* map;
  int corner[4];
  uint32_t shared;
};
void load_box(const Box& box, uint32_t barrier, uint32_t blocks, Place place);
void store_box(const Box& box, Place place);
// Sends two words to the shared memory of the block that the addresses name.
void send_words(std::array<uint32_t, 4> words, size_t bytes, uint32_t shared, uint32_t barrier, Place place);
// Copies bytes to the shared memory of this block, and counts them at the barrier.
void load_bytes(uint32_t shared, const void* source, size_t bytes, uint32_t barrier, Place place);
void commit_stores();
void wait_for_stores(int left, Place place);

// Sums of 32 products each, 64 rows of them. d is this thread's; the other members are the same in the whole warpgroup.
struct Multiplication {
  float* d;
  int columns;
  uint64_t a, b;
  bool adds;
  Format a_format, b_format;
};
void begin_products();
void multiply(const Multiplication& multiplication, Place place);
void commit_products();
void wait_for_products(int left, Place place);

template <int kColumns, typename... Operands>
void multiply(Format a_format, Format b_format, Operands&... operands) {
  constexpr int kSums = kColumns / 2;  // of a thread
  const auto all = std::tie(operands...);
  static_assert(sizeof...(operands) == kSums + 5);
  float& first = std::get<0>(all);
  if (&std::get<kSums - 1>(all) != &first + kSums - 1) fail("the sums of wgmma must be one array");
  if (std::get<kSums + 3>(all) != 1 || std::get<kSums + 4>(all) != 1) fail("wgmma with a sign is not known here");
  multiply({&first, kColumns, std::get<kSums>(all), std::get<kSums + 1>(all), std::get<kSums + 2>(all) != 0, a_format,
            b_format},
           Place::current());
}

}  // namespace emulation

inline size_t __cvta_generic_to_shared(const void* pointer) { return emulation::shared_address(pointer); }
inline void* __cvta_shared_to_generic(size_t address, Place place = Place::current()) {
  return emulation::in_shared(static_cast<uint32_t>(address), place);
}

namespace ptx {

inline void cp_async_cg_shared_global(size_t target, const void* source, size_t count,
                                      Place place = Place::current()) {
  begin_fetch(in_shared(static_cast<uint32_t>(target), place), source, count);
}
// With a hint to L2, which changes no result.
inline void cp_async_cg_shared_global_L2__128B(size_t target, const void* source, size_t count,
                                               Place place = Place::current()) {
  cp_async_cg_shared_global(target, source, count, place);
}
inline void cp_async_bulk_prefetch_L2_global(const void* first, uint32_t bytes) { prefetch(first, bytes); }
inline void prefetch_global_L2(const void*) {}
inline void cp_async_wait_all() { end_fetches(); }
inline void cp_async_commit_group() { end_batch_of_fetches(); }
inline void cp_async_wait_group(int left) { end_batches_of_fetches(left); }

inline void griddepcontrol_wait() { wait_for_kernels_before(); }
inline void griddepcontrol_launch_dependents() {}

// ---- barriers -------------------------------------------------------------------------------------------------------

inline void mbarrier_init_shared__cta_b64(uint32_t barrier, int arrivals, Place place = Place::current()) {
  begin_barrier(barrier, arrivals, place);
}
inline void mbarrier_arrive_expect_tx_shared__cta_b64(uint32_t barrier, int bytes, Place place = Place::current()) {
  arrive(barrier, bytes, place);
}
inline void mbarrier_arrive_shared__cluster_b64(uint32_t barrier, Place place = Place::current()) {
  arrive(barrier, 0, place);
}
inline void mbarrier_try_wait_parity_shared__cta_b64(uint32_t& over, uint32_t barrier, uint32_t parity,
                                                     Place place = Place::current()) {
  over = wait_for_phase(barrier, parity, place);
}
inline void st_async_weak_shared__cluster_mbarrier__complete_tx__bytes_v2_b32(uint32_t shared, uint32_t first,
                                                                              uint32_t second, uint32_t barrier,
                                                                              Place place = Place::current()) {
  send_words({first, second}, 8, shared, barrier, place);
}
inline void st_async_weak_shared__cluster_mbarrier__complete_tx__bytes_v4_b32(uint32_t shared, uint32_t first,
                                                                              uint32_t second, uint32_t third,
                                                                              uint32_t fourth, uint32_t barrier,
                                                                              Place place = Place::current()) {
  send_words({first, second, third, fourth}, 16, shared, barrier, place);
}
inline void mapa_shared__cluster_u32(uint32_t& d, uint32_t address, int rank, Place place = Place::current()) {
  d = address_in_block(address, rank, place);
}
inline void bar_sync(int number, int threads, Place place = Place::current()) {
  numbered_barrier(number, threads, place);
}

// Here every thread sees every write at once, so fences do nothing.
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared__cta() {}
inline void setmaxnreg_dec_sync_aligned_u32(int) {}
inline void setmaxnreg_inc_sync_aligned_u32(int) {}

// ---- copies ---------------------------------------------------------------------------------------------------------

inline void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(uint32_t shared, const void* source,
                                                                              int bytes, uint32_t barrier,
                                                                              Place place = Place::current()) {
  load_bytes(shared, source, bytes, barrier, place);
}

inline void cp_async_bulk_tensor_3d_shared__cluster_global_mbarrier__complete_tx__bytes(
    uint32_t shared, const CUtensorMap* map, int x, int y, int z, uint32_t barrier, Place place = Place::current()) {
  load_box({map, {x, y, z, 0}, shared}, barrier, 0, place);
}
inline void cp_async_bulk_tensor_3d_shared__cluster_global_mbarrier__complete_tx__bytes_multicast__cluster(
    uint32_t shared, const CUtensorMap* map, int x, int y, int z, uint32_t barrier, uint16_t blocks,
    Place place = Place::current()) {
  load_box({map, {x, y, z, 0}, shared}, barrier, blocks, place);
}
inline void cp_async_bulk_tensor_4d_shared__cluster_global_mbarrier__complete_tx__bytes(
    uint32_t shared, const CUtensorMap* map, int x, int y, int z, int w, uint32_t barrier,
    Place place = Place::current()) {
  load_box({map, {x, y, z, w}, shared}, barrier, 0, place);
}
inline void cp_async_bulk_tensor_3d_global_shared__cta_bulk_group(const CUtensorMap* map, int x, int y, int z,
                                                                  uint32_t shared, Place place = Place::current()) {
  store_box({map, {x, y, z, 0}, shared}, place);
}
inline void cp_async_bulk_commit_group() { commit_stores(); }
inline void cp_async_bulk_wait_group_read(int left, Place place = Place::current()) { wait_for_stores(left, place); }
inline void cp_async_bulk_wait_group(int left, Place place = Place::current()) { wait_for_stores(left, place); }

// ---- products -------------------------------------------------------------------------------------------------------

template <typename T>
inline void none(T&) {}  // an asm without an instruction
inline void wgmma_fence_sync_aligned() { begin_products(); }
inline void wgmma_commit_group_sync_aligned() { commit_products(); }
inline void wgmma_wait_group_sync_aligned(int left, Place place = Place::current()) { wait_for_products(left, place); }

template <typename... Operands>
void wgmma_mma_async_sync_aligned_m64n128k32_f32_e4m3_e4m3(Operands&&... operands) {
  multiply<128>(kE4M3, kE4M3, operands...);
}
template <typename... Operands>
void wgmma_mma_async_sync_aligned_m64n64k32_f32_e4m3_e4m3(Operands&&... operands) {
  multiply<64>(kE4M3, kE4M3, operands...);
}
template <typename... Operands>
void wgmma_mma_async_sync_aligned_m64n32k32_f32_e4m3_e4m3(Operands&&... operands) {
  multiply<32>(kE4M3, kE4M3, operands...);
}
template <typename... Operands>
void wgmma_mma_async_sync_aligned_m64n8k32_f32_e4m3_e4m3(Operands&&... operands) {
  multiply<8>(kE4M3, kE4M3, operands...);
}
template <typename... Operands>
void wgmma_mma_async_sync_aligned_m64n16k32_f32_e4m3_e4m3(Operands&&... operands) {
  multiply<16>(kE4M3, kE4M3, operands...);
}
template <typename... Operands>
void wgmma_mma_async_sync_aligned_m64n128k32_f32_e5m2_e4m3(Operands&&... operands) {
  multiply<128>(kE5M2, kE4M3, operands...);
}
template <typename... Operands>
void wgmma_mma_async_sync_aligned_m64n128k32_f32_e4m3_e5m2(Operands&&... operands) {
  multiply<128>(kE4M3, kE5M2, operands...);
}

// ---- four matrices of 8 x 8 elements of 16 bits: the lanes 8 i to 8 i + 7 have the addresses of the rows of matrix i 

inline uint32_t* in_matrix(const uint64_t* rows, int matrix, Place place) {
  const uint32_t address = static_cast<uint32_t>(rows[matrix * 8 + emulation_lane() / 4]);
  if (address % 16 != 0) fail("%s:%u: a row at %u", place.file_name(), place.line(), address);
  return static_cast<uint32_t*>(in_shared(address, place)) + emulation_lane() % 4;
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d,
                                                     uint32_t row, Place place = Place::current()) {
  const uint64_t* rows = warp_exchange("ldmatrix", 0xFFFFFFFFu, row, place);
  uint32_t* const results[] = {&a, &b, &c, &d};
  for (int i = 0; i < 4; ++i) *results[i] = *in_matrix(rows, i, place);
}
inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                                     Place place = Place::current()) {
  const uint64_t* rows = warp_exchange("stmatrix", 0xFFFFFFFFu, row, place);
  const uint32_t given[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) *in_matrix(rows, i, place) = given[i];
}

}  // namespace ptx
