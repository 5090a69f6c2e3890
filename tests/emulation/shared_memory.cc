// Shared memory is poison when a block begins, and what is beside an array must be poison when it ends.
#include "shared_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace emulation {
namespace {

constexpr size_t kGuardBytes = 1024;
constexpr size_t kDynamicBytes = 4 * kPage;  // of which a launch asks for the last
static_assert(kDynamicBytes >= kMostShared + kGuardBytes);

struct SharedArray {
  unsigned char* begin;
  size_t before, array, after;
  Place place;
};

std::vector<SharedArray> static_arrays;
unsigned char* const dynamic_end = map_between_guards(kDynamicBytes) + kDynamicBytes;  // where a launch's bytes end
size_t dynamic_bytes;

bool is_poison(const unsigned char* begin, const unsigned char* end) {
  return std::all_of(begin, end, [](unsigned char byte) { return byte == poison; });
}

SharedArray dynamic_array() {
  auto* inside = static_cast<unsigned char*>(dynamic_shared());
  return {inside - kGuardBytes, kGuardBytes, dynamic_bytes, static_cast<size_t>(dynamic_end - inside) - dynamic_bytes, Place()};
}

void poison_array(const SharedArray& array) { memset(array.begin, poison, array.before + array.array + array.after); }

void check_array(const SharedArray& array) {
  const unsigned char *inside = array.begin + array.before, *end = inside + array.array;
  if (is_poison(array.begin, inside) && is_poison(end, end + array.after)) return;
  tell_block();
  tell(" writes outside its %zu bytes of shared memory, %s:%u; ", array.array, array.place.file_name(), array.place.line());
}

}  // namespace

// Memory between two pages that must not be touched.
unsigned char* map_between_guards(size_t bytes) {
  void* begin = mmap(nullptr, bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) abort();
  mprotect(static_cast<unsigned char*>(begin) + kPage, bytes, PROT_READ | PROT_WRITE);
  return static_cast<unsigned char*>(begin) + kPage;
}

void set_dynamic_shared(size_t bytes) { dynamic_bytes = bytes; }

void poison_shared() {
  std::for_each(static_arrays.begin(), static_arrays.end(), poison_array);
  poison_array(dynamic_array());
}

void check_shared() {
  std::for_each(static_arrays.begin(), static_arrays.end(), check_array);
  check_array(dynamic_array());
}

void* dynamic_shared() { return dynamic_end - (dynamic_bytes + 15) / 16 * 16; }

void poison_around(void* begin, size_t before, size_t array, size_t after, Place place) {
  static_arrays.push_back({static_cast<unsigned char*>(begin), before, array, after, place});
  poison_array(static_arrays.back());
}

}  // namespace emulation
