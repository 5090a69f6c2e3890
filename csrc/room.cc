#include "room.h"

#include "ffi.h"

namespace jax_fp8 {
namespace {

ffi::Error room(ffi::RemainingRets) { return ffi::Error::Success(); }

XLA_FFI_DEFINE_HANDLER(handler, room, ffi::Ffi::Bind().RemainingRets());

}  // namespace

XLA_FFI_Handler* const room_handler = handler;

}  // namespace jax_fp8
