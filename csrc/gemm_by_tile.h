// By tile there is a kernel of our own, faster than cuBLASLt's where it has work for all multiprocessors. It comes
// first among the candidates of such a product, and cuBLASLt's after it.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "gemm_plan.h"
#include "grouped_gemm.h"

namespace jax_fp8 {

// The product in the words of our kernel, if that is for it.
std::optional<grouped_gemm::Problem> own_problem(const GemmProblem& problem);

// What went wrong, empty when nothing did.
std::string enqueue_own(const grouped_gemm::Problem& problem, const GemmOperands& operands, cudaStream_t stream);

}  // namespace jax_fp8
