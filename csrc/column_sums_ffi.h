// The checks of the buffers of `ColumnSums`.
#pragma once

#include "column_sums.h"
#include "ffi.h"

namespace jax_fp8 {

inline Checks& check_sums(Checks& checks, const ffi::AnyBuffer& sums, const ffi::AnyBuffer& partial_sums, int64_t rows,
                          int64_t cols) {
  return checks.dtype("the result sums", sums, {ffi::F32})
      .shape("the result sums", sums, {cols})
      .dtype("the result partial_sums", partial_sums, {ffi::F32})
      .shape("the result partial_sums", partial_sums, {divide_up(rows, kRowsPerPartialSum), cols});
}

}  // namespace jax_fp8
