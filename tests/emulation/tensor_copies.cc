// Copies of boxes and of bytes between global and shared memory, words that are sent to shared memory, and barriers
// that count arrivals and bytes.
//
// A copy happens at once, as late as possible or at a random time, depending on the order of threads. So one of the
// runs finds a kernel that does not wait for a copy, or overwrites its source. The target is poison until the copy
// happens.
#include <algorithm>
#include <vector>

#include "asynchronous.h"
#include "scheduler.h"
#include "shared_memory.h"

namespace emulation {
namespace {

// The eight bytes of a barrier in shared memory, as the emulation uses them.
struct PhaseBarrier {
  static constexpr uint8_t kBegun = 0xB7;
  int32_t bytes;  // announced, and not arrived yet
  uint8_t begun, phase, expected, pending;
};
static_assert(sizeof(PhaseBarrier) == 8);

struct Copy {
  CUtensorMap map;
  Box box;
  uint32_t barrier;
  int fiber;
  size_t rank;      // of the block whose shared memory it reads or writes
  int64_t of_group;  // of a store: its thread's group, -1 if not committed yet. Else what it is
  Place place;
  std::array<uint32_t, 4> words;
  const void* source;  // of bytes
  size_t bytes;
};
constexpr int64_t kNoGroup = -1, kLoad = -2, kWords = -3, kBytes = -4;

std::vector<Copy> copies;
int64_t groups[kMostFibers];  // of committed stores, by thread

// Reports a failure of a copy. The scheduler may run it, when there is no current thread for `fail` to name.
void tell_at(const Place& place, const char* sentence) {
  if (!failed()) tell("%s:%u: %s", place.file_name(), place.line(), sentence);
}

PhaseBarrier* barrier_at(uint32_t address, size_t rank, const Place& place) {
  auto* found = static_cast<PhaseBarrier*>(pointer_in_shared(address, rank));
  const bool good = found != nullptr && address % 8 == 0 && found->begun == PhaseBarrier::kBegun;
  if (good) return found;
  tell_at(place, "a barrier that was not begun");
  return nullptr;
}

void end_phase_when_complete(PhaseBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.expected;
  wake(&barrier);
}

// Of a box, from those of its first matrix to those of its last.
uint64_t rows_of(const CUtensorMap& map) { return uint64_t{map.box[1]} * map.box[2] * map.box[3]; }

// Calls function(global address, shared address, bytes) for every 16 bytes of a box. The global address is null outside
// of the matrix.
template <typename Function>
void for_pieces(const Copy& copy, Function function) {
  const CUtensorMap& map = copy.map;
  const uint64_t row_bytes = map.box[0] * map.bytes;
  for (uint64_t row = 0; row < rows_of(map); ++row) {
    for (uint64_t byte = 0; byte < row_bytes; byte += 16) {
      uint32_t address = static_cast<uint32_t>(copy.box.shared + row * row_bytes + byte);
      if (map.is_swizzled) address ^= (address >> 7 & 7) << 4;
      const int64_t at[] = {copy.box.corner[0] + static_cast<int64_t>(byte / map.bytes),
                            copy.box.corner[1] + static_cast<int64_t>(row % map.box[1]),
                            copy.box.corner[2] + static_cast<int64_t>(row / map.box[1] % map.box[2]),
                            copy.box.corner[3] + static_cast<int64_t>(row / map.box[1] / map.box[2])};
      bool inside = true;
      int64_t offset = 0;
      for (int i = 0; i < 4; ++i) {
        inside &= at[i] >= 0 && at[i] < static_cast<int64_t>(map.dims[i]);
        offset += at[i] * static_cast<int64_t>(map.strides[i]);
      }
      const uint64_t left = inside ? (map.dims[0] - at[0]) * map.bytes : 0;
      function(map.data + offset, pointer_in_shared(address, copy.rank), std::min<uint64_t>(left, 16));
    }
  }
}

bool is_load(const Copy& copy) { return copy.of_group == kLoad; }
bool is_store(const Copy& copy) { return copy.of_group >= kNoGroup; }

void put_words(const Copy& copy) {
  memcpy(pointer_in_shared(copy.box.shared, copy.rank), copy.words.data(), copy.bytes);
}

void put_bytes(const Copy& copy) {
  memcpy(pointer_in_shared(copy.box.shared, copy.rank), copy.source, copy.bytes);
}

void make_box(const Copy& copy) {
  for_pieces(copy, [&](char* global, void* shared, uint64_t bytes) {
    if (is_load(copy)) {
      memset(shared, 0, 16);
      memcpy(shared, global, bytes);
    } else {
      memcpy(global, shared, bytes);
    }
  });
}

void make(const Copy& copy) {
  if (failed()) return;
  if (!is_store(copy) && !is_running(copy.rank)) {
    return tell_at(copy.place, "a copy arrives in a block that has ended");
  }
  copy.of_group == kWords ? put_words(copy) : copy.of_group == kBytes ? put_bytes(copy) : make_box(copy);
  if (is_store(copy)) return;
  PhaseBarrier* barrier = barrier_at(copy.barrier, copy.rank, copy.place);
  if (barrier == nullptr) return;
  const uint64_t bytes = is_load(copy) ? copy.map.box[0] * copy.map.bytes * rows_of(copy.map) : copy.bytes;
  barrier->bytes -= static_cast<int32_t>(bytes);
  end_phase_when_complete(*barrier);
}

void make_at(size_t number) {
  const Copy copy = copies[number];
  copies.erase(copies.begin() + static_cast<ptrdiff_t>(number));
  make(copy);
}

void make_some_time(const Copy& copy) {
  if (copies_at_once()) return make(copy);
  copies.push_back(copy);
}

void begin_copy(const Box& box, uint32_t barrier, size_t rank, int64_t of_group, Place place) {
  const Copy copy = {*box.map, box, barrier, current, rank, of_group, place, {}, nullptr, 0};
  if (box.shared % 128 != 0) fail("%s:%u: a box at %u of shared memory", place.file_name(), place.line(), box.shared);
  for_pieces(copy, [&](char*, void* shared, uint64_t) {
    if (shared == nullptr) fail("%s:%u: a box outside of shared memory", place.file_name(), place.line());
    if (of_group == kLoad) memset(shared, poison, 16);
  });
  make_some_time(copy);
}

}  // namespace

void begin_barrier(uint32_t address, int arrivals, Place place) {
  auto* barrier = static_cast<PhaseBarrier*>(in_shared(address, place));
  *barrier = {0, PhaseBarrier::kBegun, 0, static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals)};
}

void arrive(uint32_t address, int64_t bytes, Place place) {
  const size_t rank = rank_of_address(address);
  if (!is_running(rank)) fail("%s:%u: an arrival in a block that has ended", place.file_name(), place.line());
  PhaseBarrier* barrier = barrier_at(address, rank, place);
  if (barrier == nullptr) return leave_failed();
  if (barrier->pending == 0) fail("%s:%u: an arrival that nobody expects", place.file_name(), place.line());
  barrier->bytes += static_cast<int32_t>(bytes);
  --barrier->pending;
  end_phase_when_complete(*barrier);
}

bool wait_for_phase(uint32_t address, uint32_t parity, Place place) {
  PhaseBarrier* barrier = barrier_at(address, current_rank(), place);
  if (barrier == nullptr) leave_failed();
  if (barrier->phase != parity) return true;
  wait_until_woken("mbarrier.try_wait", barrier, place);
  return false;
}

void load_box(const Box& box, uint32_t barrier, uint32_t blocks, Place place) {
  if (blocks == 0) return begin_copy(box, barrier, current_rank(), kLoad, place);
  for (size_t rank = 0; blocks >> rank != 0; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    address_in_block(box.shared, rank, place);  // fails unless that block runs
    begin_copy(box, barrier, rank, kLoad, place);
  }
}

void store_box(const Box& box, Place place) { begin_copy(box, 0, current_rank(), kNoGroup, place); }

void send_words(std::array<uint32_t, 4> words, size_t bytes, uint32_t shared, uint32_t barrier, Place place) {
  const size_t rank = rank_of_address(shared);
  if (rank != rank_of_address(barrier)) fail("%s:%u: a barrier of another block", place.file_name(), place.line());
  if (!is_running(rank)) fail("%s:%u: words for a block that has ended", place.file_name(), place.line());
  void* target = pointer_in_shared(shared, rank);
  if (target == nullptr || shared % bytes != 0) fail("%s:%u: words at %u", place.file_name(), place.line(), shared);
  memset(target, poison, bytes);
  make_some_time({{}, {nullptr, {}, shared}, barrier, current, rank, kWords, place, words, nullptr, bytes});
}

void load_bytes(uint32_t shared, const void* source, size_t bytes, uint32_t barrier, Place place) {
  const size_t rank = current_rank();
  void* target = pointer_in_shared(shared, rank);
  const bool is_inside = target != nullptr && pointer_in_shared(shared + bytes - 1, rank) != nullptr;
  if (bytes == 0 || (shared | bytes | reinterpret_cast<uintptr_t>(source)) % 16 != 0 || !is_inside) {
    fail("%s:%u: %zu bytes to %u", place.file_name(), place.line(), bytes, shared);
  }
  memset(target, poison, bytes);
  make_some_time({{}, {nullptr, {}, shared}, barrier, current, rank, kBytes, place, {}, source, bytes});
}

void commit_stores() {
  for (Copy& copy : copies) {
    if (copy.fiber == current && copy.of_group == kNoGroup) copy.of_group = groups[current];
  }
  ++groups[current];
}

void wait_for_stores(int left, Place) {
  for (size_t i = 0; i < copies.size();) {
    const Copy& copy = copies[i];
    const bool waits = copy.fiber == current && copy.of_group >= 0 && copy.of_group < groups[current] - left;
    waits ? make_at(i) : static_cast<void>(++i);
  }
}

bool end_some_copy(bool only_at_random) {
  if (copies.empty() || (only_at_random && !chance_of_one_in(8))) return false;
  make_at(choose(copies.size()));
  return true;
}

void check_stores() {
  for (const Copy& copy : copies) {
    if (copy.fiber == current && is_store(copy)) fail("a thread ends before what it stores has been read");
  }
}

void forget_copies() {
  copies.clear();
  std::fill(groups, groups + kMostFibers, 0);
}

}  // namespace emulation
