#include "cross_entropy.h"

#include "ffi.h"

namespace jax_fp8 {
namespace {

constexpr char kOperation[] = "jax_fp8_cross_entropy";

ffi::Error cross_entropy(cudaStream_t stream, ffi::AnyBuffer logits, ffi::AnyBuffer labels, ffi::AnyBuffer shares,
                         ffi::Result<ffi::AnyBuffer> gradient, ffi::Result<ffi::AnyBuffer> loss,
                         ffi::Result<ffi::AnyBuffer> lse, float z_loss) {
  Checks checks(kOperation);
  checks.matrix("logits", logits).dtype("logits", logits, {ffi::F32, ffi::BF16, ffi::F16});
  if (!checks.passed()) return checks.error();
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  checks.require(vocab > 0, "logits", logits, "have at least one column")
      .finite("z_loss", z_loss)
      .dtype("labels", labels, {ffi::S32})
      .shape("labels", labels, {rows})
      .dtype("shares", shares, {ffi::F32})
      .shape("shares", shares, {rows})
      .dtype("the result gradient", *gradient, {logits.element_type()})
      .shape("the result gradient", *gradient, {rows, vocab})
      .dtype("the result loss", *loss, {ffi::F32})
      .shape("the result loss", *loss, {rows})
      .dtype("the result lse", *lse, {ffi::F32})
      .shape("the result lse", *lse, {rows});
  if (!checks.passed()) return checks.error();
  const CrossEntropyArguments arguments{
      .logits = logits.untyped_data(),
      .type = *source_type(logits.element_type()),
      .labels = labels.typed_data<int32_t>(),
      .shares = shares.typed_data<float>(),
      .z_loss = z_loss,
      .gradient = gradient->untyped_data(),
      .loss = loss->typed_data<float>(),
      .lse = lse->typed_data<float>(),
      .rows = rows,
      .vocab = vocab,
  };
  return launch_result(kOperation, launch_cross_entropy(arguments, stream));
}

XLA_FFI_DEFINE_HANDLER(handler, cross_entropy,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // logits
                           .Arg<ffi::AnyBuffer>()  // labels
                           .Arg<ffi::AnyBuffer>()  // shares
                           .Ret<ffi::AnyBuffer>()  // gradient
                           .Ret<ffi::AnyBuffer>()  // loss
                           .Ret<ffi::AnyBuffer>()  // lse
                           .Attr<float>("z_loss"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const cross_entropy_handler = handler;

}  // namespace jax_fp8
