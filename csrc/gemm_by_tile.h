// For products by tile we have a kernel of our own, which is faster than cuBLASLt's where the product has work for all
// multiprocessors. It is candidate 0 of such a product, and cuBLASLt's algorithms follow from candidate 1 on.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "gemm_plan.h"
#include "grouped_gemm.h"

namespace jax_fp8 {

// The product as our kernel's problem, or nothing if the kernel does not take it.
std::optional<grouped_gemm::Problem> own_problem(const GemmProblem& problem);

// Returns the reason of a failure, or an empty string.
std::string enqueue_own(const grouped_gemm::Problem& problem, const GemmOperands& operands, cudaStream_t stream);

}  // namespace jax_fp8
