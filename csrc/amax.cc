#include "amax.h"

#include "ffi.h"

namespace jax_fp8 {
namespace {

constexpr char kOperation[] = "jax_fp8_amax";

AmaxArguments arguments_of(const ffi::AnyBuffer& x, const ffi::AnyBuffer& amax, bool further) {
  return {
      .x = x.untyped_data(),
      .source = *source_type(x.element_type()),
      .count = count_of(x),
      .amax = amax.typed_data<float>(),
      .further = further,
  };
}

ffi::Error amax(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs further, ffi::Result<ffi::AnyBuffer> amax) {
  std::vector<ffi::AnyBuffer> tensors{x};
  for (size_t i = 0; i < further.size(); ++i) tensors.push_back(*further.get<ffi::AnyBuffer>(i));
  Checks checks(kOperation);
  for (const ffi::AnyBuffer& tensor : tensors) checks.dtype("x", tensor, {ffi::F32, ffi::BF16, ffi::F16});
  checks.float32_scalar("the result", *amax);
  if (!checks.passed()) return checks.error();
  cudaError_t status = cudaSuccess;
  for (size_t i = 0; i < tensors.size() && status == cudaSuccess; ++i) {
    status = launch_amax(arguments_of(tensors[i], *amax, i > 0), stream);
  }
  return launch_result(kOperation, status);
}

XLA_FFI_DEFINE_HANDLER(handler, amax,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x
                           .RemainingArgs()         // further tensors
                           .Ret<ffi::AnyBuffer>(),  // amax
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const amax_handler = handler;

}  // namespace jax_fp8
