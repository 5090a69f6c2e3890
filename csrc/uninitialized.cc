#include "uninitialized.h"

#include "ffi.h"

namespace jax_fp8 {
namespace {

// XLA does not count operands that a binding leaves out. So the handler binds all of them, and counts them itself.
ffi::Error uninitialized(ffi::RemainingArgs operands, ffi::RemainingRets) {
  if (operands.size() == 0) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("jax_fp8_uninitialized: must be called without operands, got " +
                                     std::to_string(operands.size()));
}

XLA_FFI_DEFINE_HANDLER(handler, uninitialized, ffi::Ffi::Bind().RemainingArgs().RemainingRets());

}  // namespace

XLA_FFI_Handler* const uninitialized_handler = handler;

}  // namespace jax_fp8
