#include "gemm_plan.h"

#include <array>

#include "launch.h"

namespace jax_fp8 {
namespace {

using cublaslt::library;
using cublaslt::Status;

Failure failure_of(const char* call, Status status) {
  if (status == cublaslt::kSuccess) return {};
  return {std::string(call) + " failed with " + library().status_name(status)};
}

// An address for the heuristic, which checks whether one is set but does not read from it. Before the first launch XLA
// may pass no addresses.
const void* placed(const void* address) {
  return address != nullptr ? address : reinterpret_cast<const void*>(kFullAlignment);
}

// Host-side descriptions of the matrices, owned for one call. cuBLASLt is column-major: in its memory order our d[m, n]
// is a matrix [n, m], the product of b and aᵀ. So its A is our b, and its B is our a.
class Description {
 public:
  Description(const GemmProblem& problem, const GemmOperands& operands) {
    keep(library().desc_create(&operation, cublaslt::kCompute32F, CUDA_R_32F));
    keep(library().layout_create(&d, problem.d_type, problem.n, problem.m, problem.n));
    if (problem.contracting_first) {
      keep(library().layout_create(&a, problem.b_type, problem.n, problem.k, problem.n));
      keep(library().layout_create(&b, problem.a_type, problem.m, problem.k, problem.m));
      set(cublaslt::kTransA, cublaslt::kNotTransposed);
      set(cublaslt::kTransB, cublaslt::kTransposed);
      return;
    }
    keep(library().layout_create(&a, problem.b_type, problem.k, problem.n, problem.k));
    keep(library().layout_create(&b, problem.a_type, problem.k, problem.m, problem.k));
    set(cublaslt::kTransA, cublaslt::kTransposed);
    set(cublaslt::kTransB, cublaslt::kNotTransposed);
    set(cublaslt::kFastAccumulation, static_cast<int8_t>(problem.fast_accumulation));
    set(cublaslt::kAScalePointer, placed(operands.b_scale));
    set(cublaslt::kBScalePointer, placed(operands.a_scale));
    if (problem.a_scaling != cublaslt::kOneScale) {
      set(cublaslt::kAScaleMode, problem.b_scaling);
      set(cublaslt::kBScaleMode, problem.a_scaling);
    }
    if (!problem.has_bias) return;
    set(cublaslt::kEpilogue, cublaslt::kEpilogueBias);
    set(cublaslt::kBiasDataType, problem.bias_type);
    set(cublaslt::kBiasPointer, placed(operands.bias));
  }

  ~Description() {
    if (d != nullptr) library().layout_destroy(d);
    if (b != nullptr) library().layout_destroy(b);
    if (a != nullptr) library().layout_destroy(a);
    if (operation != nullptr) library().desc_destroy(operation);
  }

  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  cublaslt::MatmulDesc operation = nullptr;
  cublaslt::MatrixLayout a = nullptr, b = nullptr, d = nullptr;  // c has the layout of d
  Status status = cublaslt::kSuccess;                            // the first failure

 private:
  void keep(Status latest) {
    if (status == cublaslt::kSuccess) status = latest;
  }

  template <typename Value>
  void set(cublaslt::MatmulAttribute attribute, const Value& value) {
    if (status == cublaslt::kSuccess) keep(library().desc_set(operation, attribute, &value, sizeof(value)));
  }
};

struct Preference {
  cublaslt::Preference handle = nullptr;
  ~Preference() {
    if (handle != nullptr) library().preference_destroy(handle);
  }
};

// The one place that picks an algorithm: the candidate of this rank in the heuristic's list. The heuristic sorts by
// expected time, and the order is always the same for one version of cuBLASLt and one kind of GPU.
Failure choose_algorithm(cublaslt::Handle handle, const Description& description, uintptr_t alignment, int candidate,
                         cublaslt::Algorithm* algorithm) {
  Preference preference;
  Status status = library().preference_create(&preference.handle);
  if (status != cublaslt::kSuccess) return failure_of("cublasLtMatmulPreferenceCreate", status);
  const uint64_t workspace_bytes = kWorkspaceBytes;
  const auto alignment_bytes = static_cast<uint32_t>(alignment);
  status =
      library().preference_set(preference.handle, cublaslt::kMaxWorkspaceBytes, &workspace_bytes, sizeof(uint64_t));
  for (const auto attribute :
       {cublaslt::kMinAlignmentA, cublaslt::kMinAlignmentB, cublaslt::kMinAlignmentC, cublaslt::kMinAlignmentD}) {
    if (status != cublaslt::kSuccess) break;
    status = library().preference_set(preference.handle, attribute, &alignment_bytes, sizeof(uint32_t));
  }
  if (status != cublaslt::kSuccess) return failure_of("cublasLtMatmulPreferenceSetAttribute", status);
  std::array<cublaslt::HeuristicResult, kMaxCandidates> results{};
  const int requested = candidate == 0 ? 1 : kMaxCandidates;
  int found = 0;
  status = library().heuristic(handle, description.operation, description.a, description.b, description.d,
                               description.d, preference.handle, requested, results.data(), &found);
  if (status != cublaslt::kSuccess) found = 0;
  int offered = 0;
  for (int rank = 0; rank < found; ++rank) {
    if (results[rank].state != cublaslt::kSuccess) {
      status = results[rank].state;
    } else if (offered++ == candidate) {
      *algorithm = results[rank].algorithm;
      return {};
    }
  }
  if (offered == 0) {
    return {std::string("cuBLASLt has no algorithm for this product (") + library().status_name(status) +
            "); FP8 needs a GPU of compute capability 8.9 or newer"};
  }
  return {.reason = "candidate must be one of the " + std::to_string(offered) + " algorithms that cuBLASLt " +
                    cublaslt::version_name() + " offers for this product, got rank " + std::to_string(candidate) +
                    "; tune again on this machine",
          .off_the_list = true};
}

Failure current_handle(cublaslt::Handle* handle) {
  if (!library().missing.empty()) return {library().missing};
  return failure_of("cublasLtCreate", cublaslt::handle_of_current_device(handle));
}

// 0 for a device past the 64th, which so counts as never prepared.
uint64_t bit_of_current_device() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && device < 64 ? uint64_t{1} << device : 0;
}

uintptr_t alignment_of(const GemmOperands& operands) {
  const bool full = is_aligned(operands.a, kFullAlignment) && is_aligned(operands.b, kFullAlignment) &&
                    is_aligned(operands.c, kFullAlignment) && is_aligned(operands.d, kFullAlignment);
  return full ? kFullAlignment : kMinAlignment;
}

}  // namespace

Failure GemmPlans::run(const GemmProblem& problem, const GemmOperands& operands, uintptr_t alignment,
                       const cudaStream_t* stream) {
  cublaslt::Handle handle = nullptr;
  if (Failure failure = current_handle(&handle)) return failure;
  const Description description(problem, operands);
  if (description.status != cublaslt::kSuccess) {
    return failure_of("describing the matrices to cuBLASLt", description.status);
  }
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return {cudaGetErrorString(error)};

  const int candidate = alignment == kFullAlignment ? problem.candidate : 0;
  const Key key{device, alignment, problem.m, problem.n, problem.k, problem.a_type, problem.b_type, problem.d_type};
  cublaslt::Algorithm algorithm;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = algorithms_.find(key);
    if (found == algorithms_.end()) {
      if (Failure failure = choose_algorithm(handle, description, alignment, candidate, &algorithm)) return failure;
      found = algorithms_.emplace(key, algorithm).first;
    }
    algorithm = found->second;
  }
  if (stream == nullptr) return {};

  const float beta = problem.has_c ? 1.0f : 0.0f;
  const void* const addend = problem.has_c ? operands.c : operands.d;
  const Status status = library().matmul(handle, description.operation, &problem.alpha, operands.b, description.a,
                                         operands.a, description.b, &beta, addend, description.d, operands.d,
                                         description.d, &algorithm, operands.workspace, kWorkspaceBytes, *stream);
  return failure_of("cublasLtMatmul", status);
}

Failure GemmPlans::prepare(const GemmProblem& problem, const GemmOperands& operands) {
  Failure failure = run(problem, operands, kFullAlignment, nullptr);
  if (!failure) prepared_devices_.fetch_or(bit_of_current_device());
  return failure;
}

bool GemmPlans::prepared() const { return (prepared_devices_.load() & bit_of_current_device()) != 0; }

Failure GemmPlans::enqueue(const GemmProblem& problem, const GemmOperands& operands, cudaStream_t stream) {
  return run(problem, operands, alignment_of(operands), &stream);
}

}  // namespace jax_fp8
