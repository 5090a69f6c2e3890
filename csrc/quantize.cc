#include "quantize.h"

#include "ffi.h"

namespace jax_fp8 {
namespace {

constexpr char kQuantize[] = "jax_fp8_quantize";
constexpr char kQuantizeTranspose[] = "jax_fp8_quantize_transpose";

struct QuantizeBuffers {
  ffi::AnyBuffer x, scale, values, amax;
};

Checks check(const char* operation, const QuantizeBuffers& buffers) {
  Checks checks(operation);
  checks.rank("x", buffers.x, 2)
      .dtype("x", buffers.x, {ffi::F32, ffi::BF16, ffi::F16})
      .float32_scalar("scale", buffers.scale)
      .dtype("the result values", buffers.values, {ffi::F8E4M3FN, ffi::F8E5M2})
      .shape("the result values", buffers.values, shape_of(buffers.x))
      .float32_scalar("the result amax", buffers.amax);
  return checks;
}

QuantizeArguments arguments_of(const QuantizeBuffers& buffers) {
  return {
      .x = buffers.x.untyped_data(),
      .source = *source_type(buffers.x.element_type()),
      .scale = buffers.scale.typed_data<float>(),
      .format = *fp8_type(buffers.values.element_type()),
      .values = static_cast<uint8_t*>(buffers.values.untyped_data()),
      .values_t = nullptr,
      .amax = buffers.amax.typed_data<float>(),
      .rows = buffers.x.dimensions()[0],
      .cols = buffers.x.dimensions()[1],
  };
}

ffi::Error quantize(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::Result<ffi::AnyBuffer> values,
                    ffi::Result<ffi::AnyBuffer> amax) {
  const QuantizeBuffers buffers{x, scale, *values, *amax};
  const Checks checks = check(kQuantize, buffers);
  if (!checks.passed()) return checks.error();
  return launch_result(kQuantize, launch_quantize(arguments_of(buffers), stream));
}

ffi::Error quantize_transpose(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                              ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> values_t,
                              ffi::Result<ffi::AnyBuffer> amax) {
  const QuantizeBuffers buffers{x, scale, *values, *amax};
  Checks checks = check(kQuantizeTranspose, buffers);
  if (checks.passed()) {
    checks.dtype("the result values_t", *values_t, {values->element_type()})
        .shape("the result values_t", *values_t, {x.dimensions()[1], x.dimensions()[0]});
  }
  if (!checks.passed()) return checks.error();
  QuantizeArguments arguments = arguments_of(buffers);
  arguments.values_t = static_cast<uint8_t*>(values_t->untyped_data());
  return launch_result(kQuantizeTranspose, launch_quantize_transpose(arguments, stream));
}

XLA_FFI_DEFINE_HANDLER(plain, quantize,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x
                           .Arg<ffi::AnyBuffer>()   // scale
                           .Ret<ffi::AnyBuffer>()   // values
                           .Ret<ffi::AnyBuffer>(),  // amax
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(transposing, quantize_transpose,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // x
                           .Arg<ffi::AnyBuffer>()   // scale
                           .Ret<ffi::AnyBuffer>()   // values
                           .Ret<ffi::AnyBuffer>()   // values_t
                           .Ret<ffi::AnyBuffer>(),  // amax
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const quantize_handler = plain;
XLA_FFI_Handler* const quantize_transpose_handler = transposing;

}  // namespace jax_fp8
