// One fiber runs at a time, until it ends or waits for others.
//
// The next to run is the first, the last or a random one of those that can run. So a kernel that lacks a barrier reads
// memory that no thread has written yet, and finds poison there. Of the blocks of a cluster, too, the first or the last
// runs as far as it can before another does. When no fiber can run, the kernel has a deadlock. Every failure abandons
// the launch, and its sentence is raised in Python.
#include "fibers.h"

#include <sys/mman.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "scheduler.h"
#include "shared_memory.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {

Fiber fibers[kMostFibers];
State states[kMostFibers];
size_t block_fibers, blocks;
int current = -1;
jmp_buf scheduler;

namespace {

constexpr size_t kStackBytes = 256 * 1024;  // room for a few copies of a table of 32 KB in the parameters

size_t threads;  // of a block
uint64_t first_block;
bool begun[kMostBlocks], ended[kMostBlocks];
int openings;  // of the cluster's barrier

void (*kernel)(const void* closure);
const void* closure;

unsigned char* stacks;

int64_t order;  // 0: the first fiber that can run; 1: the last one; else a random one, and this is the seed
std::minstd_rand random_number;

uint3 position(uint64_t number, dim3 size) {
  const uint64_t row = number / size.x;
  return {static_cast<unsigned>(number % size.x), static_cast<unsigned>(row % size.y),
          static_cast<unsigned>(row / size.y)};
}

void enter_block(size_t rank) { blockIdx = position(first_block + rank, gridDim); }

void leave() {
  if (_setjmp(fibers[current].left) == 0) _longjmp(scheduler, 1);
}

void resume(int next) {
  current = next;
  enter_block(rank_of(next));
  begun[rank_of(next)] = true;
  threadIdx = position(next % block_fibers, blockDim);
  enter_with_late_arrays();
  if (_setjmp(scheduler) == 0) {
    if (std::exchange(fibers[next].started, true)) _longjmp(fibers[next].left, 1);
    setcontext(&fibers[next].start);
  }
  current = -1;
  enter_with_late_arrays();
}

void wait(State state, const char* what, uint32_t mask, Place place) {
  Fiber& self = fibers[current];
  states[current] = state;
  self.waits_for = what, self.mask = mask, self.place = place;
}

void fiber_body() {
  kernel(closure);
  check_fetches(), check_stores(), check_products(), check_waits();
  states[current] = kEnded;
  _longjmp(scheduler, 1);
}

// The first fiber in this state, or null.
const State* find(const State* begin, const State* end, State wanted) {
  return static_cast<const State*>(memchr(begin, wanted, end - begin));
}

// A fiber of a block that can run, or -1.
int pick(size_t rank) {
  State* const first = states + rank * block_fibers;
  const size_t start = order > 1 ? random_number() % block_fibers : 0;
  const auto ready_in = [&](size_t begin, size_t end) {
    const void* found =
        order == 1 ? memrchr(first + begin, kReady, end - begin) : memchr(first + begin, kReady, end - begin);
    return found == nullptr ? -1 : static_cast<int>(static_cast<const State*>(found) - states);
  };
  const int found = ready_in(start, block_fibers);
  return found >= 0 ? found : ready_in(0, start);
}

// Releases a block when all its threads that have not ended wait at the same barrier.
bool open_block_barrier(size_t rank) {
  State *const begin = states + rank * block_fibers, *const end = begin + block_fibers;
  const State* first = find(begin, end, kAtBlockBarrier);
  if (first == nullptr) return false;
  for (State* state = begin; state < end; ++state) {
    if (!is_gone(*state) && !stand_together(state - states, first - states)) return false;
  }
  std::replace(begin, end, kAtBlockBarrier, kReady);
  return true;
}

// Releases the cluster when all its threads that have not ended have arrived.
bool open_cluster_barrier() {
  State* const end = states + blocks * block_fibers;
  if (find(states, end, kAtClusterBarrier) == nullptr) return false;
  for (const State* state = states; state < end; ++state) {
    if (!is_gone(*state) && fibers[state - states].arrivals == openings) return false;
  }
  ++openings;
  std::replace(states, end, kAtClusterBarrier, kReady);
  return true;
}

int pick() {
  while (end_some_copy(true)) {
  }
  const size_t start = order > 1 ? random_number() % blocks : 0;
  do {
    for (size_t i = 0; i < blocks; ++i) {
      const size_t rank = order == 1 ? blocks - 1 - i : (start + i) % blocks;
      int found = ended[rank] ? -1 : pick(rank);
      if (found < 0 && !ended[rank] && open_block_barrier(rank)) found = pick(rank);
      if (found >= 0) return found;
    }
  } while (!failed() && (open_cluster_barrier() || end_some_copy(false)));
  return -1;
}

void start_fibers() {
  for (size_t i = 0; i < blocks * block_fibers; ++i) {
    states[i] = i % block_fibers < threads ? kReady : kAbsent;
    ucontext_t& context = fibers[i].start;
    fibers[i].started = false;
    fibers[i].arrivals = fibers[i].waits = 0;
    if (context.uc_stack.ss_sp != nullptr) continue;  // made for an earlier cluster; reusing it saves two system calls
    getcontext(&context);
    context.uc_stack = {stacks + i * kStackBytes + kPage, 0, kStackBytes - kPage};
    makecontext(&context, fiber_body, 0);
  }
}

// Poisons the shared memory that a block leaves: no later block may read it.
void end_block_of(size_t fiber) {
  const size_t rank = rank_of(fiber);
  State* const begin = states + rank * block_fibers;
  if (!std::all_of(begin, begin + block_fibers, is_gone)) return;
  ended[rank] = true;
  check_shared(rank);
  poison_shared(rank);
}

void run_cluster() {
  openings = 0;
  forget_copies();
  forget_products();
  for (size_t rank = 0; rank < blocks; ++rank) {
    begun[rank] = ended[rank] = false;
    poison_shared(rank);
  }
  start_fibers();
  while (!failed()) {
    const int next = pick();
    if (next < 0) break;
    resume(next);
    if (states[next] == kEnded) end_block_of(next);
  }
  if (failed()) return;
  if (std::count(ended, ended + blocks, true) != static_cast<ptrdiff_t>(blocks)) return tell_deadlock();
  for (size_t rank = 0; rank < blocks && blocks > 1; ++rank) {
    enter_block(rank);
    check_untouched(rank);
  }
}

std::vector<uint64_t> clusters_in_order(uint64_t count) {
  std::vector<uint64_t> clusters(count);
  std::iota(clusters.begin(), clusters.end(), 0);
  if (order == 1) std::reverse(clusters.begin(), clusters.end());
  if (order > 1) std::shuffle(clusters.begin(), clusters.end(), random_number);
  return clusters;
}

}  // namespace

unsigned char poison;

void block_barrier(Place place) {
  wait(kAtBlockBarrier, "__syncthreads", 0, place);
  leave();
}

bool is_running(size_t rank) { return rank < blocks && begun[rank] && !ended[rank]; }

void wait_until_woken(const char* what, const void* by, Place place) {
  fibers[current].wakes = by;
  wait(kAsleep, what, 0, place);
  leave();
}

void wake(const void* those) {
  for (size_t i = 0; i < blocks * block_fibers; ++i) {
    if (states[i] == kAsleep && fibers[i].wakes == those) states[i] = kReady;
  }
}

void leave_failed() { _longjmp(scheduler, 1); }

bool copies_at_once() { return order == 0; }

size_t choose(size_t count) { return order == 1 ? count - 1 : random_number() % count; }

bool chance_of_one_in(unsigned count) { return order > 1 && random_number() % count == 0; }

size_t current_rank() { return rank_of(current); }

void arrive_at_cluster(Place place) {
  Fiber& self = fibers[current];
  if (self.arrivals != self.waits) {
    fail("%s:%u: an arrival at the cluster's barrier that follows another, and no wait", place.file_name(),
         place.line());
  }
  ++self.arrivals;
}

void wait_for_cluster(Place place) {
  Fiber& self = fibers[current];
  if (self.arrivals == self.waits) {
    fail("%s:%u: a wait for the cluster's barrier without an arrival", place.file_name(), place.line());
  }
  if (openings >= ++self.waits) return;
  wait(kAtClusterBarrier, "barrier.cluster.wait", 0, place);
  leave();
}

void* in_block(const void* shared, size_t rank, Place place) {
  if (rank >= blocks) fail("%s:%u: block %zu of a cluster of %zu", place.file_name(), place.line(), rank, blocks);
  if (!begun[rank] || ended[rank]) {
    fail("%s:%u: block %zu of the cluster has %s", place.file_name(), place.line(), rank,
         ended[rank] ? "ended" : "not begun");
  }
  void* found = find_shared(shared, current_rank(), rank);
  if (found == nullptr) {
    fail("%s:%u: %p is not in shared memory of this block", place.file_name(), place.line(), shared);
  }
  return found;
}

const uint64_t* warp_exchange(const char* what, uint32_t mask, uint64_t value, Place place) {
  const int self = current, first = self / kLanes * kLanes;
  if (!(mask >> (self - first) & 1)) {
    fail("%s:%u: lane %d is not in its own mask 0x%08X", place.file_name(), place.line(), self - first, mask);
  }
  fibers[self].given = value;
  wait(kInWarp, what, mask, place);
  const auto for_lanes = [&](auto function) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (mask >> lane & 1) function(first + lane);
    }
  };
  uint32_t waiting = 0;
  for (int lane = 0; lane < kLanes; ++lane) waiting |= uint32_t{states[first + lane] == kInWarp} << lane;
  bool complete = (waiting & mask) == mask;
  if (complete) for_lanes([&](int i) { complete &= stand_together(i, self); });  // only the last lane to arrive checks
  if (complete) {
    uint64_t lanes[kLanes];
    memset(lanes, poison, sizeof(lanes));  // values of lanes outside of the mask are undefined
    for_lanes([&](int i) { lanes[i - first] = fibers[i].given; });
    for_lanes([&](int i) {
      memcpy(fibers[i].lanes, lanes, sizeof(lanes));
      states[i] = kReady;
    });
  }
  leave();
  return fibers[self].lanes;
}

void run_grid(const Grid& grid, void (*kernel_)(const void*), const void* closure_) {
  gridDim = grid.grid, blockDim = grid.block, kernel = kernel_, closure = closure_;
  threads = grid.block.count(), block_fibers = (threads + kLanes - 1) / kLanes * kLanes, blocks = grid.cluster;
  if (blocks * block_fibers > kMostFibers) {
    return tell("a cluster of %zu threads; here are %zu", blocks * block_fibers, kMostFibers);
  }
  set_dynamic_shared(grid.shared_bytes);
  forget_fetches();
  const FaultHandler handler;
  for (uint64_t i : clusters_in_order(gridDim.count() / blocks)) {
    first_block = i * blocks;
    run_cluster();
    if (failed()) break;
  }
}

}  // namespace emulation

extern "C" {  // what Python calls

// Maps the stacks for all libraries of the process, since the number of maps of a process is limited. Every stack ends
// at a guard page.
void* emulation_map_stacks() {
  using namespace emulation;
  unsigned char* stacks = map_between_guards(kMostFibers * kStackBytes);
  for (size_t i = 0; i < kMostFibers; ++i) mprotect(stacks + i * kStackBytes, kPage, PROT_NONE);
  return stacks;
}

void emulation_begin(int64_t order, int64_t poison, void* stacks) {
  emulation::order = order;
  emulation::random_number.seed(static_cast<unsigned>(order));
  emulation::poison = static_cast<unsigned char>(poison);
  emulation::stacks = static_cast<unsigned char*>(stacks);
  emulation::clear_failure();
}

}
