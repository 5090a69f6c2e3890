// Helpers that run on the host before a launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "sizes.h"

namespace jax_fp8 {

inline bool is_aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Whether all pointers allow accesses of 16 bytes. A null pointer, a result that is not needed, counts as aligned.
inline bool are_aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(), [](const void* pointer) { return is_aligned(pointer, 16); });
}

}  // namespace jax_fp8
