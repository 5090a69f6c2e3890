// One fiber runs at a time, until it ends or waits for others.
//
// Who runs next is the first, the last or a random one of those that can: a kernel that lacks a barrier then reads what has not been
// written yet, and what it reads is poison. A wait that never ends is found when no fiber can run. Whatever goes wrong abandons the
// launch, and the sentence that says so reaches Python.
#include "fibers.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "checks.h"
#include "shared_memory.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {
namespace {

constexpr size_t kStackBytes = 256 * 1024;  // a table of 32 KB among the parameters is copied a few times

enum State : unsigned char { kReady, kAtBlockBarrier, kInWarp, kEnded };

struct Fiber {
  bool started;
  ucontext_t start;
  jmp_buf left;  // from where it goes on; unlike a context, at no cost of a system call
  const char* waits_for;
  Place place;
  uint32_t mask;           // the lanes that take part
  uint64_t given;          // to the other lanes
  uint64_t lanes[kLanes];  // what every lane gave
};

Fiber fibers[kMostThreads];
State states[kMostThreads];
size_t threads;
int current = -1;  // in host code
jmp_buf scheduler;

void (*kernel)(const void* closure);
const void* closure;

unsigned char* stacks;

int64_t order;  // 0: the first fiber that can run; 1: the last one; else a random one, and this is the seed
std::minstd_rand random_number;

char failure[1024];
void* fault;  // the address that was not to be touched
struct sigaction handler_before;

// ---- failing -------------------------------------------------------------------------------------------------------------

void on_fault(int, siginfo_t* info, void*) {
  if (current < 0) {  // host code: not ours to explain
    sigaction(SIGSEGV, &handler_before, nullptr);
    return;
  }
  fault = info->si_addr;
  fail("a kernel touches memory that it must not");
}

bool same_place(const Place& a, const Place& b) {
  return a.line() == b.line() && a.column() == b.column() && strcmp(a.file_name(), b.file_name()) == 0;
}

bool stand_together(size_t a, size_t b) {
  if (states[a] != states[b]) return false;
  return states[a] == kEnded || (fibers[a].mask == fibers[b].mask && same_place(fibers[a].place, fibers[b].place));
}

void tell_deadlock() {
  tell("deadlock in ");
  tell_block();
  std::vector<bool> told(threads);
  for (size_t i = 0; i < threads; ++i) {
    if (told[i]) continue;
    int count = 0;
    for (size_t j = i; j < threads; ++j) {
      if (!stand_together(i, j)) continue;
      told[j] = true;
      ++count;
    }
    const Fiber& first = fibers[i];
    tell("; %d threads, first %zu, ", count, i);
    if (states[i] == kEnded) {
      tell("have ended");
    } else {
      tell("wait in %s at %s:%u", first.waits_for, first.place.file_name(), first.place.line());
      if (states[i] == kInWarp) tell(" for the lanes 0x%08X", first.mask);
    }
  }
}

// ---- scheduling ----------------------------------------------------------------------------------------------------------

uint3 position(uint64_t number, dim3 size) {
  const uint64_t row = number / size.x;
  return {static_cast<unsigned>(number % size.x), static_cast<unsigned>(row % size.y), static_cast<unsigned>(row / size.y)};
}

void leave() {
  if (_setjmp(fibers[current].left) == 0) _longjmp(scheduler, 1);
}

void resume(int next) {
  current = next;
  threadIdx = position(next, blockDim);
  if (_setjmp(scheduler) == 0) {
    if (std::exchange(fibers[next].started, true)) _longjmp(fibers[next].left, 1);
    setcontext(&fibers[next].start);
  }
  current = -1;
}

void wait(State state, const char* what, uint32_t mask, Place place) {
  Fiber& self = fibers[current];
  states[current] = state;
  self.waits_for = what, self.mask = mask, self.place = place;
}

void fiber_body() {
  kernel(closure);
  states[current] = kEnded;
  _longjmp(scheduler, 1);
}

// A fiber that can run, or -1.
int pick() {
  const int start = order > 1 ? static_cast<int>(random_number() % threads) : 0;
  const auto ready_in = [](int begin, int end) {
    const void* found = order == 1 ? memrchr(states + begin, kReady, end - begin) : memchr(states + begin, kReady, end - begin);
    return found == nullptr ? -1 : static_cast<int>(static_cast<const State*>(found) - states);
  };
  const int found = ready_in(start, static_cast<int>(threads));
  return found >= 0 ? found : ready_in(0, start);
}

// Lets everyone go on when all who have not ended wait at the same barrier.
bool open_block_barrier() {
  const State* first = std::find(states, states + threads, kAtBlockBarrier);
  if (first == states + threads) return false;
  for (size_t i = 0; i < threads; ++i) {
    if (states[i] != kEnded && !stand_together(i, first - states)) return false;
  }
  std::replace(states, states + threads, kAtBlockBarrier, kReady);
  return true;
}

void start_fibers() {
  std::fill(states, states + threads, kReady);
  for (size_t i = 0; i < threads; ++i) {
    ucontext_t& context = fibers[i].start;
    fibers[i].started = false;
    getcontext(&context);
    context.uc_stack = {stacks + i * kStackBytes + kPage, 0, kStackBytes - kPage};
    makecontext(&context, fiber_body, 0);
  }
}

void run_block() {
  poison_shared();
  start_fibers();
  while (!failed()) {
    const int next = pick();
    if (next < 0 && open_block_barrier()) continue;
    if (next < 0) break;
    resume(next);
  }
  if (failed()) return;
  if (std::count(states, states + threads, kEnded) != static_cast<ptrdiff_t>(threads)) return tell_deadlock();
  check_shared();
}

std::vector<uint64_t> blocks_in_order(uint64_t count) {
  std::vector<uint64_t> blocks(count);
  std::iota(blocks.begin(), blocks.end(), 0);
  if (order == 1) std::reverse(blocks.begin(), blocks.end());
  if (order > 1) std::shuffle(blocks.begin(), blocks.end(), random_number);
  return blocks;
}

}  // namespace

unsigned char poison;

void tell(const char* format, ...) {
  const size_t length = strlen(failure);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(failure + length, sizeof(failure) - length, format, arguments);
  va_end(arguments);
}

void tell_block() { tell("block (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z); }

bool failed() { return failure[0] != 0; }

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(failure, sizeof(failure), format, arguments);
  va_end(arguments);
  if (current < 0) {  // in host code, where there is nothing to go back to
    fputs(failure, stderr);
    abort();
  }
  tell(", in thread (%u, %u, %u) of ", threadIdx.x, threadIdx.y, threadIdx.z);
  tell_block();
  _longjmp(scheduler, 1);
}

void block_barrier(Place place) {
  wait(kAtBlockBarrier, "__syncthreads", 0, place);
  leave();
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
  bool complete = true;
  for_lanes([&](int i) { complete &= i < static_cast<int>(threads) && states[i] == kInWarp && stand_together(i, self); });
  if (complete) {
    for_lanes([&](int i) {
      memset(fibers[i].lanes, poison, sizeof(fibers[i].lanes));  // what other lanes give is not defined
      for_lanes([&](int j) { fibers[i].lanes[j - first] = fibers[j].given; });
      states[i] = kReady;
    });
  }
  leave();
  return fibers[self].lanes;
}

void run_grid(dim3 grid, dim3 block, size_t shared_bytes, void (*kernel_)(const void*), const void* closure_) {
  gridDim = grid, blockDim = block, kernel = kernel_, closure = closure_;
  threads = block.count();
  set_dynamic_shared(shared_bytes);
  static unsigned char signal_stack[64 * 1024];
  stack_t stack = {signal_stack, 0, sizeof(signal_stack)}, stack_before;
  sigaltstack(&stack, &stack_before);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // the handler does not return
  sigaction(SIGSEGV, &action, &handler_before);
  for (uint64_t i : blocks_in_order(grid.count())) {
    blockIdx = position(i, grid);
    run_block();
    if (failed()) break;
  }
  sigaction(SIGSEGV, &handler_before, nullptr);
  sigaltstack(&stack_before, nullptr);
}

}  // namespace emulation

extern "C" {  // what Python calls

// For all libraries of the process, which may not have many times as many maps. Every stack ends at a page to stop at.
void* emulation_map_stacks() {
  using namespace emulation;
  unsigned char* stacks = map_between_guards(kMostThreads * kStackBytes);
  for (size_t i = 0; i < kMostThreads; ++i) mprotect(stacks + i * kStackBytes, kPage, PROT_NONE);
  return stacks;
}

void emulation_begin(int64_t order, int64_t poison, void* stacks) {
  emulation::order = order;
  emulation::random_number.seed(static_cast<unsigned>(order));
  emulation::poison = static_cast<unsigned char>(poison);
  emulation::stacks = static_cast<unsigned char*>(stacks);
  emulation::failure[0] = 0;
  emulation::fault = nullptr;
}

const char* emulation_failure() { return emulation::failure; }
void* emulation_fault() { return emulation::fault; }
}
