// The GEMM for cuBLASLt, without XLA: a problem, the addresses of its operands, and the algorithm chosen for it.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "cublaslt.h"

namespace jax_fp8 {

constexpr int64_t kWorkspaceBytes = 32 << 20;  // what NVIDIA recommends for Hopper
constexpr uintptr_t kMinAlignment = 16;        // of every matrix; cuBLASLt requires it for FP8
constexpr uintptr_t kFullAlignment = 256;      // of XLA's own allocations; the heuristic then offers more algorithms
constexpr int64_t kScaleTile = 128;            // elements of a line, and of a side of a square, that share a scale
constexpr int64_t kScalesAlignment = 4;        // the last dim of an array of scales is a multiple of this
constexpr int kMaxCandidates = 16;             // the length of the heuristic's list, of which a call site takes one

// Row-major d[m, n] = alpha (a[m, k] * a_scale) · (b[n, k] * b_scale)ᵀ + bias[n] + c[m, n], of FP8 operands; or,
// contracting the first dims, d[m, n] = alpha a[k, m]ᵀ · b[k, n] + c[m, n] of 16-bit operands.
//
// An operand has one scale; or one for each line of 128 elements along k, as f32[ceil(k / 128), rows]; or one for each
// square of 128 x 128, as f32[ceil(rows / 128), ceil(k / 128)]. The last dim of both arrays is padded to a multiple of
// 4.
struct GemmProblem {
  int64_t m, n, k;
  cudaDataType_t a_type, b_type, d_type, bias_type;  // c has the type of d
  bool has_bias, has_c, fast_accumulation;
  float alpha;
  int candidate;  // rank in the heuristic's list of algorithms, best guess first
  cublaslt::ScaleMode a_scaling = cublaslt::kOneScale, b_scaling = cublaslt::kOneScale;
  bool contracting_first = false;
};

struct GemmOperands {
  const void *a, *b, *a_scale, *b_scale, *bias, *c;
  void *d, *workspace;
};

// The reason of a failure; false where nothing failed: `if (failure)`.
struct Failure {
  std::string reason;         // empty if nothing failed
  bool off_the_list = false;  // cuBLASLt offers no candidate of this rank

  explicit operator bool() const { return !reason.empty(); }
};

// The algorithms that the heuristic chose for one call site. Bias, c, accumulation, scaling, alpha and candidate are
// attributes of the call site, so the key does not contain them.
class GemmPlans {
 public:
  // Before the first launch: creates cuBLASLt's handle and picks the algorithm for matrices aligned as XLA allocates
  // them.
  Failure prepare(const GemmProblem& problem, const GemmOperands& operands);

  // Whether `prepare` has succeeded on the current device. XLA initializes a call site before every execution of its
  // program, on the host, while the device may be idle. The shapes of a call site never change, so once is enough.
  bool prepared() const;

  // Enqueues the product with the algorithm that it looks up. Only operands with less alignment make it ask the
  // heuristic again, which is host work and legal under CUDA graph capture. A candidate is a rank in the list for full
  // alignment. The list for less alignment differs, so there the product takes the first algorithm.
  Failure enqueue(const GemmProblem& problem, const GemmOperands& operands, cudaStream_t stream);

 private:
  // device, alignment, m, n, k, types
  using Key = std::tuple<int, uintptr_t, int64_t, int64_t, int64_t, int, int, int>;

  // Without a stream it only picks the algorithm, and enqueues nothing.
  Failure run(const GemmProblem& problem, const GemmOperands& operands, uintptr_t alignment,
              const cudaStream_t* stream);

  std::atomic<uint64_t> prepared_devices_{0};  // one bit for each device
  std::mutex mutex_;
  std::map<Key, cublaslt::Algorithm> algorithms_;
};

}  // namespace jax_fp8
