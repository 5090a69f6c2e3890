// Copies that a thread starts and later waits for (cp.async). Until it has waited, their target holds poison.
#include <algorithm>
#include <vector>

#include "scheduler.h"
#include "shared_memory.h"

namespace emulation {
namespace {

struct Fetch {
  unsigned char* target;
  unsigned char bytes[16];
  size_t count;
  int later_batches;  // how many batches ended after its own; -1: its own has not ended
};

std::vector<Fetch> fetches[kMostFibers];
std::vector<Prefetched> all_prefetched;

template <typename Condition>
void end_fetches_if(Condition condition) {
  std::erase_if(fetches[current], [&](const Fetch& fetch) {
    if (!condition(fetch)) return false;
    memcpy(fetch.target, fetch.bytes, fetch.count);
    return true;
  });
}

}  // namespace

void begin_fetch(void* target, const void* source, size_t count) {
  const auto is_aligned = [&](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % count == 0; };
  if (!is_aligned(target) || !is_aligned(source)) fail("cp.async of %zu bytes from %p to %p", count, source, target);
  const size_t rank = current_rank();
  if (find_shared(target, rank, rank) == nullptr) fail("cp.async to %p, which is not in shared memory", target);
  Fetch fetch{static_cast<unsigned char*>(target), {}, count, -1};
  memcpy(fetch.bytes, source, count);
  memset(target, poison, count);
  fetches[current].push_back(fetch);
}

void end_fetches() {
  end_fetches_if([](const Fetch&) { return true; });
}

void end_batch_of_fetches() {
  for (Fetch& fetch : fetches[current]) ++fetch.later_batches;
}

void end_batches_of_fetches(int left) {
  end_fetches_if([left](const Fetch& fetch) { return fetch.later_batches >= left; });
}

void prefetch(const void* first, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(first) % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
    fail("a prefetch of %zu bytes from %p", bytes, first);
  }
  const auto* const begin = static_cast<const volatile unsigned char*>(first);
  for (size_t i = 0; i < bytes; i += 16) begin[i];
  all_prefetched.push_back({static_cast<const unsigned char*>(first), bytes});
}

const std::vector<Prefetched>& prefetched() { return all_prefetched; }

void forget_fetches() {
  all_prefetched.clear();
  std::for_each(fetches, fetches + kMostFibers, [](auto& of_fiber) { of_fiber.clear(); });
}

void check_fetches() {
  if (!fetches[current].empty()) fail("a thread ends before what it fetches has arrived");
}

}  // namespace emulation
