// What the scheduler knows of the fibers, for the files that it is made of.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include "fibers.h"

namespace emulation {

constexpr size_t kMostFibers = 8192;

enum State : unsigned char { kReady, kAtBlockBarrier, kAtClusterBarrier, kInWarp, kAsleep, kEnded, kAbsent };

struct Fiber {
  bool started;
  ucontext_t start;
  jmp_buf left;  // from where it goes on; unlike a context, at no cost of a system call
  const char* waits_for;
  Place place;
  uint32_t mask;           // the lanes that take part
  uint64_t given;          // to the other lanes
  const void* wakes;       // who wakes it
  int arrivals, waits;     // at the cluster's barrier
  uint64_t lanes[kLanes];  // what every lane gave
};

// The fibers of a block are whole warps, of which the last may lack lanes.
extern Fiber fibers[kMostFibers];
extern State states[kMostFibers];
extern size_t block_fibers, blocks;  // fibers of a block, blocks of the cluster
extern int current;                  // -1 in host code
extern jmp_buf scheduler;

inline size_t rank_of(size_t fiber) { return fiber / block_fibers; }
inline bool is_gone(State state) { return state == kEnded || state == kAbsent; }

// In the same block, and at the same place.
bool stand_together(size_t a, size_t b);

// That this thread has waited for all that it fetches; before a launch, nothing is on its way.
void check_fetches();
void forget_fetches();

bool is_running(size_t rank);

// Leaves this thread until another, or a copy, wakes all that wait for the same.
void wait_until_woken(const char* what, const void* by, Place place);
void wake(const void* those);
[[noreturn]] void leave_failed();

// Copies of boxes and products, in files of their own.
bool copies_at_once();
size_t choose(size_t count);
bool chance_of_one_in(unsigned count);
bool end_some_copy(bool only_at_random);
void check_stores();
void forget_copies();
void check_products();
void forget_products();

// ---- failing --------------------------------------------------------------------------------------------------------

// Forgets what went wrong before.
void clear_failure();

// Adds to what is written down as the failure.
__attribute__((format(printf, 1, 2))) void tell(const char* format, ...);
void tell_block();
void tell_deadlock();

// While it lives, a touch of forbidden memory is a failure of the kernel.
class FaultHandler {
 public:
  FaultHandler();
  ~FaultHandler();

 private:
  stack_t stack_before_;
};

}  // namespace emulation
