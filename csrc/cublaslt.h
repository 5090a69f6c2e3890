// The part of cuBLASLt's C interface that the GEMM needs, and how it is found at run time.
//
// The library is opened lazily, by soname: importing works on a machine without it, and the copy jax has already loaded
// is the one used. Declaring these few names here keeps cuBLAS's headers, hundreds of megabytes of wheel, out of the
// build; cublaslt_check.cc compares every one of them with NVIDIA's header where that is at hand.
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
  kScalesOfLines = 4,    // of 128 elements along k
  kScalesOfSquares = 5,  // of 128 x 128 elements
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

// Entry points, resolved once. `missing` is empty when all were found and says why otherwise.
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

// "13.1.0". The library must have been found.
std::string version_name();

// The handle of the current device, made on first use and kept for the life of the process: destroying it at exit would
// race with the driver's own shutdown.
Status handle_of_current_device(Handle* handle);

}  // namespace jax_fp8::cublaslt
