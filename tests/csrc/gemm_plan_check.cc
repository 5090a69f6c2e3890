// csrc/gemm_plan.cc over a cuBLASLt that is made up: which algorithm a product takes, and what is said when there is none.
//
//     gemm_plan_check <candidate> <offered> <unsound> <address> [<contracting_first>]
//
// The heuristic offers `offered` algorithms, that of rank `unsound` (-1: none) in vain; all operands lie at `address`.
// Prints a line for the failure, and one for: whether it is one of a rank off the list, how many were requested, which
// was run (for full alignment 100 + rank, else 200 + rank; -1 for none), how often the heuristic was asked once it was
// prepared, and whether c and d were two addresses. Then a line of what cuBLASLt was told last: whether its operands A
// and B are transposed, how many scales there are, and rows, columns and leading dim of d, A and B.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>

#include "gemm_plan.h"

extern "C" cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
extern "C" const char* cudaGetErrorString(cudaError_t) { return "an error"; }

namespace jax_fp8::cublaslt {
namespace {

constexpr Status kNotSupported = 15;
int offered, unsound, requested, asked, ran = -1;
uint32_t alignment;
bool apart;
int transposed[2], scales;
std::string layouts;

Library made_up() {
  Library library{};
  library.status_name = [](Status status) { return status == kSuccess ? "SUCCESS" : "NOT_SUPPORTED"; };
  library.desc_create = [](MatmulDesc*, ComputeType, cudaDataType_t) {
    scales = 0;
    layouts.clear();
    return kSuccess;
  };
  library.desc_destroy = [](MatmulDesc) { return kSuccess; };
  library.desc_set = [](MatmulDesc, MatmulAttribute attribute, const void* value, size_t size) {
    if (attribute == kTransA || attribute == kTransB) std::memcpy(&transposed[attribute - kTransA], value, size);
    scales += attribute == kAScalePointer || attribute == kBScalePointer;
    return kSuccess;
  };
  library.layout_create = [](MatrixLayout*, cudaDataType_t, uint64_t rows, uint64_t cols, int64_t leading_dim) {
    layouts += " " + std::to_string(rows) + " " + std::to_string(cols) + " " + std::to_string(leading_dim);
    return kSuccess;
  };
  library.layout_destroy = [](MatrixLayout) { return kSuccess; };
  library.preference_create = [](Preference*) { return kSuccess; };
  library.preference_destroy = [](Preference) { return kSuccess; };
  library.preference_set = [](Preference, PreferenceAttribute attribute, const void* value, size_t size) {
    if (attribute == kMinAlignmentA) std::memcpy(&alignment, value, size);
    return kSuccess;
  };
  library.heuristic = [](Handle, MatmulDesc, MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout, Preference, int wanted,
                         HeuristicResult* results, int* found) {
    ++asked;
    requested = wanted;
    *found = std::min(wanted, offered);
    for (int rank = 0; rank < *found; ++rank) {
      results[rank].algorithm.data[0] = (alignment == kFullAlignment ? 100 : 200) + rank;
      results[rank].state = rank == unsound ? kNotSupported : kSuccess;
    }
    return *found > 0 ? kSuccess : kNotSupported;
  };
  library.matmul = [](Handle, MatmulDesc, const void*, const void*, MatrixLayout, const void*, MatrixLayout, const void*,
                      const void* c, MatrixLayout, void* d, MatrixLayout, const Algorithm* algorithm, void*, size_t,
                      cudaStream_t) {
    ran = static_cast<int>(algorithm->data[0]);
    apart = c != d;
    return kSuccess;
  };
  return library;
}

}  // namespace

const Library& library() {
  static const Library library = made_up();
  return library;
}
std::string version_name() { return "13.1.0"; }
Status handle_of_current_device(Handle*) { return kSuccess; }

}  // namespace jax_fp8::cublaslt

int main(int count, char** arguments) {
  using namespace jax_fp8;
  cublaslt::offered = std::atoi(arguments[2]);
  cublaslt::unsound = std::atoi(arguments[3]);
  void* const at = reinterpret_cast<void*>(std::atoll(arguments[4]));
  void* const elsewhere = reinterpret_cast<void*>(std::atoll(arguments[4]) + (1 << 20));
  const GemmProblem problem{.m = 16,
                            .n = 32,
                            .k = 48,
                            .a_type = CUDA_R_8F_E4M3,
                            .b_type = CUDA_R_8F_E4M3,
                            .d_type = CUDA_R_32F,
                            .bias_type = CUDA_R_16BF,
                            .has_bias = false,
                            .has_c = true,
                            .fast_accumulation = true,
                            .alpha = 1,
                            .candidate = std::atoi(arguments[1]),
                            .contracting_first = count > 5};
  const GemmOperands operands{
      .a = at, .b = at, .a_scale = at, .b_scale = at, .bias = nullptr, .c = elsewhere, .d = at, .workspace = at};
  GemmPlans plans;
  Failure failure = plans.prepare(problem, operands);
  if (!failure) {
    cublaslt::asked = 0;
    failure = plans.enqueue(problem, operands, nullptr);
  }
  std::cout << failure.reason << "\n"
            << failure.off_the_list << " " << cublaslt::requested << " " << cublaslt::ran << " "
            << cublaslt::asked << " " << cublaslt::apart << "\n"
            << cublaslt::transposed[0] << " " << cublaslt::transposed[1] << " " << cublaslt::scales << cublaslt::layouts << "\n";
}
