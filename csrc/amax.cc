#include "amax.h"

#include "ffi.h"

namespace jax_fp8 {
namespace {

constexpr char kOperation[] = "jax_fp8_amax";

ffi::Error amax(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> amax) {
  Checks checks(kOperation);
  checks.dtype("x", x, {ffi::F32, ffi::BF16, ffi::F16}).float32_scalar("the result", *amax);
  if (!checks.passed()) return checks.error();
  const AmaxArguments arguments{
      .x = x.untyped_data(),
      .source = *source_type(x.element_type()),
      .count = static_cast<int64_t>(x.element_count()),
      .amax = amax->typed_data<float>(),
  };
  return launch_result(kOperation, launch_amax(arguments, stream));
}

XLA_FFI_DEFINE_HANDLER(handler, amax,
                       ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const amax_handler = handler;

}  // namespace jax_fp8
