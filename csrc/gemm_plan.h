// The GEMM in cuBLASLt's words, without XLA: a problem, the addresses of its operands, and the algorithm chosen for it.
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
constexpr uintptr_t kMinAlignment = 16;        // of every matrix, or the tensor cores cannot load it
constexpr uintptr_t kFullAlignment = 256;      // of XLA's own allocations; the heuristic has more to choose from
constexpr int64_t kScaleTile = 128;            // elements of a line, and of a side of a square, that share a scale
constexpr int64_t kScalesAlignment = 4;        // the last dim of scales is a multiple of this
constexpr int kMaxCandidates = 16;             // how much of the heuristic's list a call site may choose from

// Row-major d[m, n] = alpha (a[m, k] * a_scale) · (b[n, k] * b_scale)ᵀ + bias[n] + c[m, n], of FP8 operands; or,
// contracting the first dims, d[m, n] = alpha a[k, m]ᵀ · b[k, n] + c[m, n] of 16-bit operands.
//
// A scale is one number, or one for each line of 128 elements along k, as f32[ceil(k / 128), rows], or one for each
// square of 128 x 128, as f32[ceil(rows / 128), ceil(k / 128)]; the last dim of these is filled up to a multiple of 4.
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

// What failed, if anything did: `if (failure)`.
struct Failure {
  std::string reason;         // empty when all went well
  bool off_the_list = false;  // cuBLASLt offers no candidate of this rank

  explicit operator bool() const { return !reason.empty(); }
};

// What one call site has been told by the heuristic. Bias, c, accumulation, scaling, alpha and candidate are attributes
// of the call site, so they are not part of the key.
class GemmPlans {
 public:
  // Before the first launch: cuBLASLt's handle, and the algorithm for matrices aligned as XLA allocates them.
  Failure prepare(const GemmProblem& problem, const GemmOperands& operands);

  // Whether that has succeeded on the current device. XLA initializes a call site before every execution of its
  // program, on the host, while the device may be waiting; the shapes of a call site never change, so once is enough.
  bool prepared() const;

  // Enqueues the product. The algorithm is a lookup; only a less aligned address makes it ask the heuristic again,
  // which is host work and legal under CUDA graph capture. Candidates are ranked for full alignment: with less, the
  // list is another one, and its first is taken.
  Failure enqueue(const GemmProblem& problem, const GemmOperands& operands, cudaStream_t stream);

 private:
  // device, alignment, m, n, k, types
  using Key = std::tuple<int, uintptr_t, int64_t, int64_t, int64_t, int, int, int>;

  // Without a stream it stops once there is an algorithm.
  Failure run(const GemmProblem& problem, const GemmOperands& operands, uintptr_t alignment,
              const cudaStream_t* stream);

  std::atomic<uint64_t> prepared_devices_{0};  // one bit a device
  std::mutex mutex_;
  std::map<Key, cublaslt::Algorithm> algorithms_;
};

}  // namespace jax_fp8
