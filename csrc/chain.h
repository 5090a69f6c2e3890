// Kernels one after another in one custom call, where each may begin before the one before it has ended.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

extern XLA_FFI_Handler* const chain_handler;

}  // namespace jax_fp8
