// Shared memory is poison when a block begins, and the bytes around each array must still be poison when it ends. Each
// block of a cluster has its own copy of every array.
#include "shared_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "asynchronous.h"
#include "scheduler.h"

namespace emulation {
namespace {

constexpr size_t kGuardBytes = 1024;
constexpr size_t kDynamicBytes = 4 * kPage;  // a launch uses the last of these
static_assert(kDynamicBytes >= kMostShared + kGuardBytes);

struct SharedArray {
  unsigned char* begin;  // of the first block's copy
  size_t stride;         // to the next block's copy
  size_t before, array, after;
  Place place;

  unsigned char* copy(size_t rank) const { return begin + rank * stride; }
  size_t bytes() const { return before + array + after; }
};

constexpr size_t kDynamicStride = kDynamicBytes + 2 * kPage;

// Every block's copy lies between two guard pages.
unsigned char* map_dynamic_shared() {
  unsigned char* first = map_between_guards(kMostBlocks * kDynamicStride);
  for (size_t rank = 0; rank < kMostBlocks; ++rank) {
    mprotect(first + rank * kDynamicStride + kDynamicBytes, 2 * kPage, PROT_NONE);
  }
  return first;
}

std::vector<SharedArray> static_arrays;
unsigned char* const dynamic_begin = map_dynamic_shared();
size_t dynamic_bytes;

bool is_poison(const unsigned char* begin, const unsigned char* end) {
  return std::all_of(begin, end, [](unsigned char byte) { return byte == poison; });
}

// The bytes of a launch lie at the end, next to the guard page.
SharedArray dynamic_array() {
  const size_t after = (16 - dynamic_bytes % 16) % 16;
  unsigned char* end = dynamic_begin + kDynamicBytes;
  return {end - after - dynamic_bytes - kGuardBytes, kDynamicStride, kGuardBytes, dynamic_bytes, after, Place()};
}

template <typename Function>
void for_arrays(Function function) {
  std::for_each(static_arrays.begin(), static_arrays.end(), function);
  function(dynamic_array());
}

}  // namespace

// Memory between two guard pages.
unsigned char* map_between_guards(size_t bytes) {
  void* begin = mmap(nullptr, bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) abort();
  mprotect(static_cast<unsigned char*>(begin) + kPage, bytes, PROT_READ | PROT_WRITE);
  return static_cast<unsigned char*>(begin) + kPage;
}

void set_dynamic_shared(size_t bytes) { dynamic_bytes = bytes; }

void poison_shared(size_t rank) {
  for_arrays([&](const SharedArray& array) { memset(array.copy(rank), poison, array.bytes()); });
}

void check_shared(size_t rank) {
  for_arrays([&](const SharedArray& array) {
    const unsigned char *begin = array.copy(rank), *inside = begin + array.before, *end = inside + array.array;
    if (is_poison(begin, inside) && is_poison(end, end + array.after)) return;
    tell_block();
    tell(" writes outside its %zu bytes of shared memory, %s:%u; ", array.array, array.place.file_name(),
         array.place.line());
  });
}

void check_untouched(size_t rank) {
  for_arrays([&](const SharedArray& array) {
    if (is_poison(array.copy(rank), array.copy(rank) + array.bytes())) return;
    tell_block();
    tell(" had ended when its shared memory was written, %s:%u; ", array.place.file_name(), array.place.line());
  });
}

void* find_shared(const void* address, size_t rank, size_t other) {
  void* found = nullptr;
  for_arrays([&](const SharedArray& array) {
    const ptrdiff_t at = static_cast<const unsigned char*>(address) - (array.copy(rank) + array.before);
    if (at >= 0 && static_cast<size_t>(at) < array.array) found = array.copy(other) + array.before + at;
  });
  return found;
}

namespace {

constexpr uint32_t kRankShift = 24, kArrayShift = 18;
static_assert(kDynamicBytes == size_t{1} << kArrayShift);  // the range of a wgmma descriptor

// The pointer of address 0 of an array: of dynamic shared memory, which comes first, or of a static array.
unsigned char* origin(size_t number, size_t rank) {
  if (number == 0) return dynamic_begin + rank * kDynamicStride;
  const SharedArray& array = static_arrays[number - 1];
  return array.copy(rank) - reinterpret_cast<uintptr_t>(array.begin) % 1024;  // the same offset for every block
}

SharedArray array_of(size_t number) { return number == 0 ? dynamic_array() : static_arrays[number - 1]; }

bool holds(const SharedArray& array, size_t rank, const unsigned char* pointer) {
  const unsigned char* begin = array.copy(rank) + array.before;
  return pointer >= begin && pointer < begin + array.array;
}

}  // namespace

uint32_t shared_address(const void* pointer) {
  const size_t rank = current_rank();
  const auto* wanted = static_cast<const unsigned char*>(pointer);
  for (size_t i = 0; i <= static_arrays.size(); ++i) {
    if (holds(array_of(i), rank, wanted)) return static_cast<uint32_t>((i << kArrayShift) + (wanted - origin(i, rank)));
  }
  return ~0u;
}

size_t rank_of_address(uint32_t address) {
  const uint32_t named = address >> kRankShift;
  return named == 0 ? current_rank() : named - 1;
}

void* pointer_in_shared(uint32_t address, size_t rank) {
  const uint32_t in_block = address & ((1u << kRankShift) - 1), number = in_block >> kArrayShift;
  if (number > static_arrays.size()) return nullptr;
  unsigned char* pointer = origin(number, rank) + (in_block & ((1u << kArrayShift) - 1));
  return holds(array_of(number), rank, pointer) ? pointer : nullptr;
}

void* in_shared(uint32_t address, Place place) {
  void* found = pointer_in_shared(address, current_rank());
  if (found == nullptr) {
    fail("%s:%u: the address 0x%08X, which is not in shared memory", place.file_name(), place.line(), address);
  }
  return found;
}

uint32_t address_in_block(uint32_t address, size_t rank, Place place) {
  in_block(in_shared(address, place), rank, place);
  return static_cast<uint32_t>(rank + 1) << kRankShift | (address & ((1u << kRankShift) - 1));
}

void* dynamic_shared() {
  const SharedArray array = dynamic_array();
  return array.copy(current_rank()) + array.before;
}

void poison_copies(void* begin, size_t stride, size_t before, size_t array, size_t after, Place place) {
  static_arrays.push_back({static_cast<unsigned char*>(begin), stride, before, array, after, place});
  for (size_t rank = 0; rank < kMostBlocks; ++rank) {
    memset(static_arrays.back().copy(rank), poison, before + array + after);
  }
}

}  // namespace emulation
