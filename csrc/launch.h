// What is computed on the host before a kernel is launched.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "sizes.h"

namespace jax_fp8 {

inline bool is_aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// For accesses of 16 bytes. What is not wanted, a null pointer, is aligned.
inline bool are_aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(), [](const void* pointer) { return is_aligned(pointer, 16); });
}

}  // namespace jax_fp8
