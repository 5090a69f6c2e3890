// The threads of a cluster of blocks as fibers: the functions on which cuda_runtime_api.h is built.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <vector>

struct uint3 {
  unsigned x, y, z;
};

struct dim3 : uint3 {
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : uint3{x, y, z} {}
  uint64_t count() const { return uint64_t{x} * y * z; }
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulation {

using Place = std::source_location;

constexpr int kLanes = 32;
constexpr size_t kMostThreads = 1024;
constexpr size_t kMostBlocks = 16;  // of a cluster
constexpr size_t kMostShared = 227 * 1024;

// Records a failure and the thread in which it happened, and ends the launch.
[[noreturn]] void fail(const char* format, ...);
bool failed();

struct Grid {
  dim3 grid, block;
  unsigned cluster;  // blocks, side by side along x
  size_t shared_bytes;
};

// Runs kernel(closure) in every thread of every block, one cluster after another. So a kernel that waits for another
// cluster never ends.
void run_grid(const Grid& grid, void (*kernel)(const void* closure), const void* closure);

// The number of this thread's block in its cluster.
size_t current_rank();

void block_barrier(Place place);
void arrive_at_cluster(Place place);
void wait_for_cluster(Place place);

// cp.async. begin_fetch starts a copy of 16, 8 or 4 bytes to shared memory, and end_fetches waits for all copies of
// this thread. end_batch_of_fetches makes a batch of the copies that are in none, and end_batches_of_fetches waits for
// all batches but the last `left`.
void begin_fetch(void* target, const void* source, size_t count);
void end_fetches();
void end_batch_of_fetches();
void end_batches_of_fetches(int left);

// griddepcontrol.wait. Before it a thread must not touch arrays that are `Late`.
void wait_for_kernels_before();

// Bytes that were asked for, of all blocks since the launch. They must be readable, in whole pieces of 16.
struct Prefetched {
  const unsigned char* first;
  size_t bytes;
};
void prefetch(const void* first, size_t bytes);
const std::vector<Prefetched>& prefetched();

// The address in another block's shared memory that corresponds to one in this block's.
void* in_block(const void* shared, size_t rank, Place place);

// Waits until all lanes of the mask have called it at the same place in the source, and returns the values of all
// lanes.
const uint64_t* warp_exchange(const char* what, uint32_t mask, uint64_t value, Place place);

// ---- memory ---------------------------------------------------------------------------------------------------------

template <typename T>
T* aligned(T* pointer, Place place) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignof(T) == 0) return pointer;
  fail("%s:%u: the address %p is not aligned to %zu bytes", place.file_name(), place.line(), pointer, alignof(T));
}

void* dynamic_shared();

// Registers a shared array: every block starts with a poisoned copy of it, and must not change the bytes around it.
void poison_copies(void* begin, size_t stride, size_t before, size_t array, size_t after, Place place);

// A static shared array with a copy for each block of a cluster. A copy is aligned as much as its declaration promises,
// and no more, so that an access which needs more fails. The first thread at the declaration creates it.
template <typename Array, size_t kWanted = 0>
struct Shared {
  static constexpr size_t kAlignment = alignof(Array) > kWanted ? alignof(Array) : kWanted;
  static constexpr size_t kBefore = kAlignment < 16 ? 16 + kAlignment : kAlignment;
  static constexpr size_t kAfter = 16;
  struct alignas(kAlignment < 16 ? 16 : kAlignment) Copy {
    unsigned char bytes[kBefore + sizeof(Array) + kAfter];
  };
  Copy copies[kMostBlocks];

  explicit Shared(Place place = Place::current()) {
    poison_copies(copies, sizeof(Copy), kBefore, sizeof(Array), kAfter, place);
  }

  Array& array() { return *reinterpret_cast<Array*>(copies[current_rank()].bytes + kBefore); }
};

}  // namespace emulation
