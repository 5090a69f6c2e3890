// The column sums of a matrix, as a by-product of a kernel whose blocks each read some of its rows.
#pragma once

#include <cstdint>

namespace jax_fp8 {

// A tile of so many rows adds one row of partial sums. kernels/quantize.py allocates them by this number.
constexpr int kRowsPerPartialSum = 128;

// Each block writes the sums over its rows, and a second kernel adds them up. Without atomics the order of the
// additions never changes, so the same input gives the same bits.
struct ColumnSums {
  float* result;   // [cols]; null where the caller needs no sums
  float* partial;  // [parts, cols], scratch
};

}  // namespace jax_fp8
