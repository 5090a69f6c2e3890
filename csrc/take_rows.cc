#include "take_rows.h"

#include "ffi.h"

namespace jax_fp8 {
namespace {

constexpr char kOperation[] = "jax_fp8_take_rows";
constexpr int64_t kMultiple = 16;

ffi::Error take_rows(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer sources, ffi::Result<ffi::AnyBuffer> taken,
                     ffi::Result<ffi::AnyBuffer> transpose) {
  Checks checks(kOperation);
  checks.matrix("x", x)
      .dtype("x", x, {ffi::F8E4M3FN, ffi::F8E5M2})
      .rank("sources", sources, 1)
      .dtype("sources", sources, {ffi::S32});
  if (!checks.passed()) return checks.error();
  const int64_t of_x = x.dimensions()[0], cols = x.dimensions()[1], rows = sources.dimensions()[0];
  const bool transposes = !is_empty(*transpose);
  checks.require(cols % kMultiple == 0, "x", x, "have a last dim that is a multiple of 16")
      .require(!transposes || rows % kMultiple == 0, "sources", sources, "be as many as a multiple of 16")
      .dtype("the result", *taken, {x.element_type()})
      .shape("the result", *taken, {rows, cols})
      .dtype("the transpose", *transpose, {x.element_type()})
      .aligned("x", x, kMultiple)
      .aligned("the result", *taken, kMultiple)
      .aligned("the transpose", *transpose, kMultiple);
  if (transposes) checks.shape("the transpose", *transpose, {cols, rows});
  if (!checks.passed()) return checks.error();
  const TakeRowsArguments arguments{
      .x = static_cast<const uint8_t*>(x.untyped_data()),
      .sources = static_cast<const int32_t*>(sources.untyped_data()),
      .taken = static_cast<uint8_t*>(taken->untyped_data()),
      .transpose = transposes ? static_cast<uint8_t*>(transpose->untyped_data()) : nullptr,
      .of_x = of_x,
      .rows = rows,
      .cols = cols,
  };
  return launch_result(kOperation, launch_take_rows(arguments, stream));
}

XLA_FFI_DEFINE_HANDLER(handler, take_rows,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x
                           .Arg<ffi::AnyBuffer>()   // sources
                           .Ret<ffi::AnyBuffer>()   // the rows
                           .Ret<ffi::AnyBuffer>(),  // their transpose, or nothing
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const take_rows_handler = handler;

}  // namespace jax_fp8
