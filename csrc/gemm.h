// d = (a * a_scale) · (b * b_scale)ᵀ + bias + c: the FP8 GEMM of cuBLASLt, as a call site with three stages.
//
//     instantiate   reads the attributes. It uses neither GPU nor cuBLAS, so compiling for a GPU needs no GPU.
//     initialize    creates cuBLASLt's handle and picks the algorithm for these shapes. XLA calls it before the first
//                   launch and outside of any CUDA graph capture.
//     execute       describes the matrices, looks up the algorithm and enqueues. May run under CUDA graph capture.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

extern XLA_FFI_Handler* const gemm_instantiate_handler;
extern XLA_FFI_Handler* const gemm_initialize_handler;
extern XLA_FFI_Handler* const gemm_execute_handler;

XLA_FFI_TypeId* gemm_state_type_id();
const XLA_FFI_TypeInfo* gemm_state_type_info();

}  // namespace jax_fp8
