// Arithmetic on sizes, offsets and counts that a caller passes. A caller may pass any 64 bits, so every function here
// saturates at the largest number rather than wrap around.
#pragma once

#include <cstdint>
#include <limits>

namespace jax_fp8 {

constexpr int64_t kMostInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostInt64 = std::numeric_limits<int64_t>::max();

// The most elements of one buffer: more than a device's memory holds, and few enough that the number of blocks of every
// launch fits an int.
constexpr int64_t kMostElements = int64_t{1} << 42;

// The most rows or columns of a matrix whose kernels index by int. Rounded up to a multiple of any tile it still fits.
constexpr int64_t kMostIndexed = kMostInt32 - 4095;

// `size` must not be negative.
constexpr int64_t divide_up(int64_t size, int64_t part) { return size / part + (size % part != 0); }

// The next multiple, or the largest number if that would overflow.
constexpr int64_t round_up(int64_t size, int64_t multiple) {
  const int64_t parts = divide_up(size, multiple);
  return parts <= kMostInt64 / multiple ? parts * multiple : kMostInt64;
}

// Of numbers that are not negative; the largest number if the result would overflow.
constexpr int64_t sum_of(int64_t a, int64_t b) { return a <= kMostInt64 - b ? a + b : kMostInt64; }
constexpr int64_t product_of(int64_t a, int64_t b) { return b == 0 || a <= kMostInt64 / b ? a * b : kMostInt64; }

// Whether the `count` elements from `first` on lie within an array of `all` elements.
constexpr bool lies_within(int64_t first, int64_t count, int64_t all) {
  return first >= 0 && count >= 0 && count <= all && first <= all - count;
}

static_assert(lies_within(16, 16, 32) && !lies_within(17, 16, 32) && !lies_within(kMostInt64 - 15, 16, 32));
static_assert(!lies_within(-16, 16, 32) && round_up(kMostInt64, 4) == kMostInt64 && round_up(5, 4) == 8);
static_assert(sum_of(kMostInt64, 1) == kMostInt64 && product_of(int64_t{1} << 32, int64_t{1} << 31) == kMostInt64);

}  // namespace jax_fp8
