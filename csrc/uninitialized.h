// Arrays without contents: XLA allocates the results, and the handler writes nothing.
//
// A loop that carries arrays from iteration to iteration needs them before the first one. XLA has no operation for an
// uninitialized array. It would fill each with zeros, a pass over memory for values that nobody reads.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

extern XLA_FFI_Handler* const uninitialized_handler;

}  // namespace jax_fp8
