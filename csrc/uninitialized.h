// Room for arrays that nobody has written yet.
//
// A loop that keeps arrays from turn to turn wants them before its first turn. XLA has no word for an array without a
// content: it would fill each with zeros, a pass over memory that nobody reads. Here nothing is done.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

extern XLA_FFI_Handler* const uninitialized_handler;

}  // namespace jax_fp8
