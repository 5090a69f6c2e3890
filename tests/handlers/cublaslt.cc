// A cuBLASLt that multiplies nothing: it checks what it is told as the real one does, and touches the first and the
// last byte of all that it would read and write, so that the sanitizer sees where they lie.
//
// It becomes a library of the soname that csrc/cublaslt.cc opens.
#include "cublaslt.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace jax_fp8::cublaslt;

namespace {

constexpr Status kInvalidValue = 7, kNotSupported = 15;
constexpr uintptr_t kAlignment = 16;

struct Layout {
  cudaDataType_t type;
  uint64_t rows, cols;
  int64_t leading_dim;
};

struct Description {
  int32_t transposed[2];
  uint32_t epilogue;
  cudaDataType_t bias_type;
  const void* bias;
  const void* scales[2];
  int32_t modes[2];
};

uint64_t bytes_of(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_32F: return 4;
    case CUDA_R_16F:
    case CUDA_R_16BF: return 2;
    default: return 1;
  }
}

// A call that the real library would take, and that reads where nothing is: there is no error to return.
[[noreturn]] void refuse(const char* what) {
  std::fprintf(stderr, "ERROR: the made-up cuBLASLt: %s\n", what);
  std::abort();
}

void touch(const char* what, const void* address, uint64_t bytes, bool writes = false) {
  if (bytes == 0) return;
  if (address == nullptr) refuse(what);
  auto* const first = static_cast<volatile unsigned char*>(const_cast<void*>(address));
  for (volatile unsigned char* byte : {first, first + (bytes - 1)}) {
    const unsigned char found = *byte;
    if (writes) *byte = found;
  }
}

void touch_matrix(const char* what, const void* address, const Layout& layout, bool writes = false) {
  if (reinterpret_cast<uintptr_t>(address) % kAlignment != 0) refuse(what);
  if (layout.rows == 0 || layout.cols == 0) return;
  touch(what, address, ((layout.cols - 1) * layout.leading_dim + layout.rows) * bytes_of(layout.type), writes);
}

uint64_t tiles_of(uint64_t size) { return (size + 127) / 128; }
uint64_t filled_up(uint64_t size) { return (size + 3) / 4 * 4; }

// Of an FP8 operand (k, rows) as cuBLASLt sees it.
void touch_scales(const void* address, int32_t mode, const Layout& operand) {
  const uint64_t k = operand.rows, rows = operand.cols;
  uint64_t count = 1;
  if (mode == kScalesOfLines) count = tiles_of(k) * filled_up(rows);
  if (mode == kScalesOfSquares) count = tiles_of(rows) * filled_up(tiles_of(k));
  if (mode != kOneScale && reinterpret_cast<uintptr_t>(address) % kAlignment != 0) refuse("scales are not aligned");
  touch("scales", address, count * sizeof(float));
}

// Whether they can be multiplied.
bool fit(const Description& how, const Layout& a, const Layout& b, const Layout& d) {
  const uint64_t m = how.transposed[0] ? a.cols : a.rows, a_k = how.transposed[0] ? a.rows : a.cols;
  const uint64_t n = how.transposed[1] ? b.rows : b.cols, b_k = how.transposed[1] ? b.cols : b.rows;
  return a_k == b_k && a_k > 0 && m == d.rows && n == d.cols && m > 0 && n > 0;
}

}  // namespace

extern "C" {

size_t cublasLtGetVersion() { return 130100; }

Status cublasLtCreate(Handle* handle) {
  static int only;
  *handle = &only;
  return kSuccess;
}

const char* cublasLtGetStatusName(Status status) {
  return status == kSuccess ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_NOT_SUPPORTED";
}

Status cublasLtMatmulDescCreate(MatmulDesc* description, ComputeType, cudaDataType_t) {
  *description = new Description{{}, kEpilogueDefault, CUDA_R_32F, nullptr, {}, {}};
  return kSuccess;
}

Status cublasLtMatmulDescDestroy(MatmulDesc description) {
  delete static_cast<Description*>(description);
  return kSuccess;
}

Status cublasLtMatmulDescSetAttribute(MatmulDesc description, MatmulAttribute attribute, const void* value,
                                      size_t size) {
  auto& how = *static_cast<Description*>(description);
  void* place = nullptr;
  switch (attribute) {
    case kTransA: place = &how.transposed[0]; break;
    case kTransB: place = &how.transposed[1]; break;
    case kEpilogue: place = &how.epilogue; break;
    case kBiasPointer: place = &how.bias; break;
    case kAScalePointer: place = &how.scales[0]; break;
    case kBScalePointer: place = &how.scales[1]; break;
    case kBiasDataType: place = &how.bias_type; break;
    case kAScaleMode: place = &how.modes[0]; break;
    case kBScaleMode: place = &how.modes[1]; break;
    case kFastAccumulation: return size == 1 ? kSuccess : kInvalidValue;
  }
  if (place == nullptr) return kInvalidValue;
  std::memcpy(place, value, size);
  return kSuccess;
}

Status cublasLtMatrixLayoutCreate(MatrixLayout* layout, cudaDataType_t type, uint64_t rows, uint64_t cols,
                                  int64_t leading_dim) {
  *layout = new Layout{type, rows, cols, leading_dim};
  return kSuccess;
}

Status cublasLtMatrixLayoutDestroy(MatrixLayout layout) {
  delete static_cast<Layout*>(layout);
  return kSuccess;
}

Status cublasLtMatmulPreferenceCreate(Preference* preference) {
  *preference = new int;
  return kSuccess;
}

Status cublasLtMatmulPreferenceDestroy(Preference preference) {
  delete static_cast<int*>(preference);
  return kSuccess;
}

Status cublasLtMatmulPreferenceSetAttribute(Preference, PreferenceAttribute, const void*, size_t) { return kSuccess; }

// It offers three algorithms, as far as so many are wanted.
Status cublasLtMatmulAlgoGetHeuristic(Handle, MatmulDesc description, MatrixLayout a, MatrixLayout b, MatrixLayout,
                                      MatrixLayout d, Preference, int requested, HeuristicResult* results,
                                      int* found) {
  *found = 0;
  const auto layout_of = [](MatrixLayout layout) { return *static_cast<Layout*>(layout); };
  if (!fit(*static_cast<Description*>(description), layout_of(a), layout_of(b), layout_of(d))) return kNotSupported;
  *found = requested < 3 ? requested : 3;
  for (int rank = 0; rank < *found; ++rank) results[rank] = {.algorithm = {}, .state = kSuccess};
  return kSuccess;
}

Status cublasLtMatmul(Handle, MatmulDesc description, const void*, const void* a, MatrixLayout a_layout,
                      const void* b, MatrixLayout b_layout, const void* beta, const void* c, MatrixLayout c_layout,
                      void* d, MatrixLayout d_layout, const Algorithm*, void* workspace, size_t workspace_bytes,
                      cudaStream_t) {
  const auto& how = *static_cast<Description*>(description);
  const auto &of_a = *static_cast<Layout*>(a_layout), &of_b = *static_cast<Layout*>(b_layout);
  const auto &of_c = *static_cast<Layout*>(c_layout), &of_d = *static_cast<Layout*>(d_layout);
  if (!fit(how, of_a, of_b, of_d)) return kInvalidValue;
  touch_matrix("A", a, of_a);
  touch_matrix("B", b, of_b);
  touch_matrix("D", d, of_d, true);
  if (*static_cast<const float*>(beta) != 0.0f) touch_matrix("C", c, of_c);
  touch("workspace", workspace, workspace_bytes, true);
  if (how.epilogue == kEpilogueBias) touch("bias", how.bias, of_d.rows * bytes_of(how.bias_type));
  if (how.scales[0] == nullptr) return kSuccess;
  touch_scales(how.scales[0], how.modes[0], of_a);
  touch_scales(how.scales[1], how.modes[1], of_b);
  return kSuccess;
}
}
