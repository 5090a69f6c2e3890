// Kernels that begin before the kernel before them has ended (griddepcontrol). Until a thread has waited, it must not
// touch what that kernel may still write or read: these arrays are protected while the thread runs.
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "scheduler.h"

namespace emulation {
namespace {

struct Late {
  void* begin;
  size_t bytes;
  int allowed;  // once a thread has waited
};

std::vector<Late> all_late;
bool has_waited[kMostFibers];
bool is_open = true;

void open(bool wanted) {
  if (wanted == is_open) return;
  is_open = wanted;
  for (const Late& late : all_late) mprotect(late.begin, late.bytes, wanted ? late.allowed : PROT_NONE);
}

}  // namespace

void wait_for_kernels_before() {
  has_waited[current] = true;
  open(true);
}

void enter_with_late_arrays() {
  if (!all_late.empty()) open(current < 0 || has_waited[current]);
}

void check_waits() {
  if (!all_late.empty() && !has_waited[current]) fail("a thread must wait for the kernels before, and ends without");
  has_waited[current] = false;  // for the next thread of this fiber
}

}  // namespace emulation

extern "C" {

void emulation_forget_late() {
  emulation::open(true);
  emulation::all_late.clear();
  std::fill(emulation::has_waited, emulation::has_waited + emulation::kMostFibers, false);
}

void emulation_add_late(void* begin, int64_t bytes, int64_t writable) {
  emulation::all_late.push_back({begin, static_cast<size_t>(bytes), writable ? PROT_READ | PROT_WRITE : PROT_READ});
}

}
