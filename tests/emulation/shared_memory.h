// The shared memory of a block, as the scheduler sees it.
#pragma once

#include "fibers.h"

namespace emulation {

constexpr size_t kPage = 64 * 1024;  // of the largest there are

extern unsigned char poison;

// Adds to what is written down as the failure.
__attribute__((format(printf, 1, 2))) void tell(const char* format, ...);
void tell_block();

// Memory between two pages that must not be touched.
unsigned char* map_between_guards(size_t bytes);

void set_dynamic_shared(size_t bytes);
void poison_shared();
void check_shared();

}  // namespace emulation
