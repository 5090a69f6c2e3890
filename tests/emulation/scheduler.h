// The state of the fibers, shared by the source files of the scheduler.
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
  jmp_buf left;  // where it continues; unlike a switch of contexts, a jump needs no system call
  const char* waits_for;
  Place place;
  uint32_t mask;           // the lanes that take part
  uint64_t given;          // the value for the other lanes
  const void* wakes;       // the object whose `wake` it waits for
  int arrivals, waits;     // at the cluster's barrier
  uint64_t lanes[kLanes];  // the values of all lanes
};

// A block has the fibers of whole warps; lanes that the last warp lacks are absent.
extern Fiber fibers[kMostFibers];
extern State states[kMostFibers];
extern size_t block_fibers, blocks;  // fibers of a block, blocks of the cluster
extern int current;                  // -1 in host code
extern jmp_buf scheduler;

inline size_t rank_of(size_t fiber) { return fiber / block_fibers; }
inline bool is_gone(State state) { return state == kEnded || state == kAbsent; }

// Whether both are in the same block and wait at the same place.
bool stand_together(size_t a, size_t b);

// check_fetches fails if this thread has not waited for all its copies. forget_fetches drops all copies before a
// launch.
void check_fetches();
void forget_fetches();

// enter_with_late_arrays protects late arrays from a thread that has not waited for the kernels before. check_waits
// fails at the end of one that never has, where there are such arrays.
void enter_with_late_arrays();
void check_waits();

bool is_running(size_t rank);

// Suspends this thread until another thread, or a copy, wakes all that wait for the same object.
void wait_until_woken(const char* what, const void* by, Place place);
void wake(const void* those);
[[noreturn]] void leave_failed();

// Copies of boxes and products: tensor_copies.cc and warpgroups.cc.
bool copies_at_once();
size_t choose(size_t count);
bool chance_of_one_in(unsigned count);
bool end_some_copy(bool only_at_random);
void check_stores();
void forget_copies();
void check_products();
void forget_products();

// ---- failing --------------------------------------------------------------------------------------------------------

// Forgets an earlier failure.
void clear_failure();

// Appends to the failure's message.
__attribute__((format(printf, 1, 2))) void tell(const char* format, ...);
void tell_block();
void tell_deadlock();

// While one exists, an access to forbidden memory is a failure of the kernel.
class FaultHandler {
 public:
  FaultHandler();
  ~FaultHandler();

 private:
  stack_t stack_before_;
};

}  // namespace emulation
