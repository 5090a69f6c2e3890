#include "cublaslt.h"

#include <dlfcn.h>

#include <atomic>
#include <map>
#include <mutex>

namespace jax_fp8::cublaslt {
namespace {

// cuBLAS keeps its ABI within a CUDA major version, which the soname contains.
const std::string kSoname = "libcublasLt.so." + std::to_string(CUDART_VERSION / 1000);

template <typename Function>
void resolve(void* handle, const char* symbol, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(dlsym(handle, symbol));
  if (function == nullptr && missing.empty()) {
    missing = kSoname + " has no " + symbol + "; install a newer nvidia-cublas";
  }
}

Library open_library() {
  Library library{};
  void* handle = dlopen(kSoname.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    library.missing = kSoname + " could not be opened (" + (reason != nullptr ? reason : "no reason given") +
                      "); install jax[cuda" + std::to_string(CUDART_VERSION / 1000) + "]";
    return library;
  }
  resolve(handle, "cublasLtGetVersion", library.version, library.missing);
  resolve(handle, "cublasLtCreate", library.create, library.missing);
  resolve(handle, "cublasLtGetStatusName", library.status_name, library.missing);
  resolve(handle, "cublasLtMatmulDescCreate", library.desc_create, library.missing);
  resolve(handle, "cublasLtMatmulDescDestroy", library.desc_destroy, library.missing);
  resolve(handle, "cublasLtMatmulDescSetAttribute", library.desc_set, library.missing);
  resolve(handle, "cublasLtMatrixLayoutCreate", library.layout_create, library.missing);
  resolve(handle, "cublasLtMatrixLayoutDestroy", library.layout_destroy, library.missing);
  resolve(handle, "cublasLtMatmulPreferenceCreate", library.preference_create, library.missing);
  resolve(handle, "cublasLtMatmulPreferenceDestroy", library.preference_destroy, library.missing);
  resolve(handle, "cublasLtMatmulPreferenceSetAttribute", library.preference_set, library.missing);
  resolve(handle, "cublasLtMatmulAlgoGetHeuristic", library.heuristic, library.missing);
  resolve(handle, "cublasLtMatmul", library.matmul, library.missing);
  return library;
}

}  // namespace

const Library& library() {
  static std::atomic<const Library*> opened{nullptr};
  if (const Library* found = opened.load()) return *found;
  // A failed search is repeated at the next call: jax may load the library later.
  static thread_local Library latest;
  latest = open_library();
  if (!latest.missing.empty()) return latest;
  const Library* none = nullptr;
  const Library* candidate = new Library(latest);
  if (!opened.compare_exchange_strong(none, candidate)) delete candidate;
  return *opened.load();
}

std::string version_name() {
  const size_t version = library().version();  // major * 10000 + minor * 100 + patch
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Status handle_of_current_device(Handle* handle) {
  static std::mutex mutex;
  static std::map<int, Handle>& handles = *new std::map<int, Handle>();
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;  // CUBLAS_STATUS_NOT_INITIALIZED
  std::lock_guard<std::mutex> lock(mutex);
  auto [entry, inserted] = handles.try_emplace(device, nullptr);
  if (inserted) {
    const Status status = library().create(&entry->second);
    if (status != kSuccess) {
      handles.erase(entry);
      return status;
    }
  }
  *handle = entry->second;
  return kSuccess;
}

}  // namespace jax_fp8::cublaslt
