// The shared memory of the blocks of a cluster, for the scheduler. The rank of a block is its number in the cluster.
#pragma once

#include "fibers.h"

namespace emulation {

constexpr size_t kPage = 64 * 1024;  // the largest page size of all systems

extern unsigned char poison;

// Memory between two pages that must not be touched.
unsigned char* map_between_guards(size_t bytes);

void set_dynamic_shared(size_t bytes);

void poison_shared(size_t rank);

// Fails if a byte around the arrays has changed.
void check_shared(size_t rank);

// Fails if any of it is not poison.
void check_untouched(size_t rank);

// The corresponding address in the shared memory of block `other`; null if `address` is not in that of block `rank`.
void* find_shared(const void* address, size_t rank, size_t other);

// A 32-bit address. Its highest byte is a block's rank plus 1, or 0 for this block. Its lowest ten bits are those of
// the pointer, since the swizzle of boxes depends on them. The pointer is null if no shared memory is at the address.
size_t rank_of_address(uint32_t address);
void* pointer_in_shared(uint32_t address, size_t rank);

}  // namespace emulation
