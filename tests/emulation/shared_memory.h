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

// An address of 32 bits: its highest byte is the number of a block and one more, or 0 for this block. The lowest ten
// bits are those of the pointer, by which boxes are swizzled. Null if nothing is there.
size_t rank_of_address(uint32_t address);
void* pointer_in_shared(uint32_t address, size_t rank);

}  // namespace emulation
