#include "gemm_by_tile.h"

#include <cstdint>

#include "launch.h"

namespace jax_fp8 {

std::optional<grouped_gemm::Problem> own_problem(const GemmProblem& problem) {
  constexpr int64_t kLeastTiles = 120;  // of 128 x 256, to keep most of an H200's 132 multiprocessors busy
  const bool is_its_kind = problem.a_scaling == cublaslt::kScalesOfLines &&
                           problem.b_scaling == cublaslt::kScalesOfSquares && problem.a_type == CUDA_R_8F_E4M3 &&
                           problem.b_type == CUDA_R_8F_E4M3;
  const bool is_large = divide_up(problem.m, kScaleTile) * divide_up(problem.n, kScaleTile) >= 2 * kLeastTiles;
  const bool fits = problem.m <= kMostIndexed && problem.n <= kMostIndexed && problem.k <= kMostIndexed;
  if (!is_its_kind || !is_large || !fits || !grouped_gemm::is_available()) return std::nullopt;
  return grouped_gemm::Problem{
      .kind = Groups::kNone,
      .shape = {static_cast<int>(problem.m), static_cast<int>(problem.n), static_cast<int>(problem.k), 1},
      .a = Fp8Type::kE4M3,
      .b = Fp8Type::kE4M3,
      .by_tile = true,
      .d = problem.d_type == CUDA_R_32F   ? SourceType::kFloat32
           : problem.d_type == CUDA_R_16F ? SourceType::kFloat16
                                          : SourceType::kBFloat16,
      .alpha = problem.alpha,
  };
}

std::string enqueue_own(const grouped_gemm::Problem& problem, const GemmOperands& operands, cudaStream_t stream) {
  return grouped_gemm::enqueue(problem,
                               {.a = operands.a,
                                .b = operands.b,
                                .a_scale = static_cast<const float*>(operands.a_scale),
                                .b_scale = static_cast<const float*>(operands.b_scale),
                                .bias = operands.bias,
                                .c = operands.c,
                                .starts = nullptr,
                                .d = operands.d},
                               stream);
}

}  // namespace jax_fp8
