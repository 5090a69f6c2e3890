// Failures: records the first one in a sentence, and abandons the launch.
#include <signal.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "checks.h"
#include "scheduler.h"

namespace emulation {
namespace {

char failure[1024];
void* fault;  // the address of a forbidden access
struct sigaction handler_before;

void on_fault(int, siginfo_t* info, void*) {
  if (current < 0) {  // a fault of host code, not of a kernel
    sigaction(SIGSEGV, &handler_before, nullptr);
    return;
  }
  fault = info->si_addr;
  fail("a kernel touches memory that it must not");
}

bool same_place(const Place& a, const Place& b) {
  return a.line() == b.line() && a.column() == b.column() && strcmp(a.file_name(), b.file_name()) == 0;
}

}  // namespace

bool stand_together(size_t a, size_t b) {
  if (states[a] != states[b] || rank_of(a) != rank_of(b)) return false;
  return is_gone(states[a]) || (fibers[a].mask == fibers[b].mask && same_place(fibers[a].place, fibers[b].place));
}

void clear_failure() {
  failure[0] = 0;
  fault = nullptr;
}

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
  if (current < 0) {  // in host code, which has no scheduler to return to
    fputs(failure, stderr);
    abort();
  }
  tell(", in thread (%u, %u, %u) of ", threadIdx.x, threadIdx.y, threadIdx.z);
  tell_block();
  _longjmp(scheduler, 1);
}

void tell_deadlock() {
  tell("deadlock in ");
  tell_block();
  std::vector<bool> told(blocks * block_fibers);
  for (size_t i = 0; i < told.size(); ++i) {
    if (told[i] || states[i] == kAbsent) continue;
    int count = 0;
    for (size_t j = i; j < told.size(); ++j) {
      if (!stand_together(i, j)) continue;
      told[j] = true;
      ++count;
    }
    const Fiber& first = fibers[i];
    tell("; %d threads, first %zu, ", count, i % block_fibers);
    if (blocks > 1) tell("of block %zu of the cluster, ", rank_of(i));
    if (states[i] == kEnded) {
      tell("have ended");
    } else {
      tell("wait in %s at %s:%u", first.waits_for, first.place.file_name(), first.place.line());
      if (states[i] == kInWarp) tell(" for the lanes 0x%08X", first.mask);
    }
  }
}

FaultHandler::FaultHandler() {
  static unsigned char signal_stack[64 * 1024];
  const stack_t stack = {signal_stack, 0, sizeof(signal_stack)};
  sigaltstack(&stack, &stack_before_);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // the handler does not return
  sigaction(SIGSEGV, &action, &handler_before);
}

FaultHandler::~FaultHandler() {
  sigaction(SIGSEGV, &handler_before, nullptr);
  sigaltstack(&stack_before_, nullptr);
}

}  // namespace emulation

extern "C" {  // what Python calls

const char* emulation_failure() { return emulation::failure; }
void* emulation_fault() { return emulation::fault; }
}
