// The shared memory of the blocks of a cluster, as the scheduler sees it; a block has a number, its rank.
#pragma once

#include "fibers.h"

namespace emulation {

constexpr size_t kPage = 64 * 1024;  // of the largest there are

extern unsigned char poison;

// Memory between two pages that must not be touched.
unsigned char* map_between_guards(size_t bytes);

void set_dynamic_shared(size_t bytes);

void poison_shared(size_t rank);

// That nothing was written beside the arrays.
void check_shared(size_t rank);

// That all of it is poison.
void check_untouched(size_t rank);

// The same place in the shared memory of another block; null if it is not in that of the first.
void* find_shared(const void* address, size_t rank, size_t other);

}  // namespace emulation
