// d[m, n] = dy[k, m]ᵀ · x[k, n] + total[m, n]: a weight's gradient in float32 from 16-bit operands, which need no
// transpose, added to a running total in place.
//
// A call site has the stages of gemm.h. XLA has such a product too, but it adds to the total in a separate pass over
// all products.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

extern XLA_FFI_Handler* const weight_gradient_instantiate_handler;
extern XLA_FFI_Handler* const weight_gradient_initialize_handler;
extern XLA_FFI_Handler* const weight_gradient_execute_handler;

XLA_FFI_TypeId* weight_gradient_state_type_id();
const XLA_FFI_TypeInfo* weight_gradient_state_type_info();

}  // namespace jax_fp8
