// The sums of a matrix's columns, as a by-product of a kernel that goes over it by parts of its rows.
#pragma once

#include <cstdint>

namespace jax_fp8 {

// Rows of a tile, whose sum is one row of partial sums. kernels/quantize.py allocates by it.
constexpr int kRowsPerPartialSum = 128;

// Without atomics the same numbers are added in the same order every time:
// each block writes what it has, a second kernel adds that up.
struct ColumnSums {
  float* result;   // [cols]; null where none are wanted
  float* partial;  // [parts, cols], scratch
};

}  // namespace jax_fp8
