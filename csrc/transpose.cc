#include "transpose.h"

#include "ffi.h"

namespace jax_fp8 {
namespace {

constexpr char kOperation[] = "jax_fp8_transpose";

ffi::Error transpose(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> transpose) {
  Checks checks(kOperation);
  checks.matrix("x", x).dtype("x", x, {ffi::F8E4M3FN, ffi::F8E5M2});
  if (!checks.passed()) return checks.error();
  const int64_t rows = x.dimensions()[0], cols = x.dimensions()[1];
  checks.dtype("the result", *transpose, {x.element_type()}).shape("the result", *transpose, {cols, rows});
  if (!checks.passed()) return checks.error();
  const TransposeArguments arguments{
      .x = static_cast<const uint8_t*>(x.untyped_data()),
      .transpose = static_cast<uint8_t*>(transpose->untyped_data()),
      .rows = rows,
      .cols = cols,
  };
  return launch_result(kOperation, launch_transpose(arguments, stream));
}

XLA_FFI_DEFINE_HANDLER(handler, transpose,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x
                           .Ret<ffi::AnyBuffer>(),  // its transpose
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const transpose_handler = handler;

}  // namespace jax_fp8
