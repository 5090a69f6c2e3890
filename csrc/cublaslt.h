// The part of cuBLASLt's C interface that the GEMM needs, resolved at run time.
//
// We open the library at first use, by its soname. So the extension can be imported on a machine without cuBLASLt, and
// uses the copy that jax has already loaded. We declare the few names here because NVIDIA's headers come in a wheel of
// hundreds of megabytes, which the build then does not need. cublaslt_check.cc compares every value with NVIDIA's
// header where the build finds it.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace jax_fp8::cublaslt {

using Status = int;
constexpr Status kSuccess = 0;

using Handle = void*;
using MatmulDesc = void*;
using MatrixLayout = void*;
using Preference = void*;

enum ComputeType : int { kCompute32F = 68 };

enum MatmulAttribute : int {
  kTransA = 3,
  kTransB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kAScalePointer = 17,
  kBScalePointer = 18,
  kFastAccumulation = 25,
  kBiasDataType = 26,
  kAScaleMode = 31,
  kBScaleMode = 32,
};

enum ScaleMode : int32_t {
  kOneScale = 0,
  kScalesOfLines = 4,    // one for each 1 x 128 elements along k
  kScalesOfSquares = 5,  // one for each 128 x 128 elements
};

enum Epilogue : uint32_t { kEpilogueDefault = 1, kEpilogueBias = 4 };

enum Operation : int32_t { kNotTransposed = 0, kTransposed = 1 };

enum PreferenceAttribute : int {
  kMaxWorkspaceBytes = 1,
  kMinAlignmentA = 5,
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};

struct Algorithm {
  uint64_t data[8];
};

struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

// Entry points, resolved once. `missing` is empty if all were found; else it says what is missing and what to do.
struct Library {
  std::string missing;
  size_t (*version)();
  Status (*create)(Handle*);
  const char* (*status_name)(Status);
  Status (*desc_create)(MatmulDesc*, ComputeType, cudaDataType_t);
  Status (*desc_destroy)(MatmulDesc);
  Status (*desc_set)(MatmulDesc, MatmulAttribute, const void*, size_t);
  Status (*layout_create)(MatrixLayout*, cudaDataType_t, uint64_t rows, uint64_t cols, int64_t leading_dim);
  Status (*layout_destroy)(MatrixLayout);
  Status (*preference_create)(Preference*);
  Status (*preference_destroy)(Preference);
  Status (*preference_set)(Preference, PreferenceAttribute, const void*, size_t);
  Status (*heuristic)(Handle, MatmulDesc, MatrixLayout a, MatrixLayout b, MatrixLayout c, MatrixLayout d, Preference,
                      int requested, HeuristicResult*, int* found);
  Status (*matmul)(Handle, MatmulDesc, const void* alpha, const void* a, MatrixLayout, const void* b, MatrixLayout,
                   const void* beta, const void* c, MatrixLayout, void* d, MatrixLayout, const Algorithm*,
                   void* workspace, size_t workspace_bytes, cudaStream_t);
};

const Library& library();

// The version as text, such as 13.1.0. The library must have been found.
std::string version_name();

// The handle of the current device, created at first use. The process never destroys it: at exit that would race with
// the driver's own shutdown.
Status handle_of_current_device(Handle* handle);

}  // namespace jax_fp8::cublaslt
