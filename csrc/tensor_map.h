// Tensor maps: what the host tells the copies of boxes (TMA, device/async_copy.cuh) about matrices in memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace jax_fp8 {

constexpr int kBoxBytes = 128;  // of a row of a box

using Encode = decltype(&cuTensorMapEncodeTiled);

// Looks the function up in the running driver. A library linked against the driver could not be opened on a machine
// without one. A success is kept, and a failed search is repeated, since its cause may go away. Threads that search at
// the same time find the same address, so no lock is needed.
inline Encode find_encode() {
  static std::atomic<Encode> kept{nullptr};
  if (const Encode encode = kept.load()) return encode;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  constexpr unsigned kSinceCuda12 = 12000;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kSinceCuda12, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  kept.store(reinterpret_cast<Encode>(found));
  return reinterpret_cast<Encode>(found);
}

struct Extent {
  int64_t columns, rows, matrices;
};

// Makes a tensor map of row-major matrices that lie one after the other in memory. A copy moves a box of them, whose
// rows have 128 bytes: the width of the swizzle that the tensor cores read.
inline std::string describe(CUtensorMap* map, const void* data, CUtensorMapDataType type, int bytes, Extent extent,
                     int box_rows) {
  const Encode encode = find_encode();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12 or newer";
  const cuuint64_t dims[] = {cuuint64_t(extent.columns), cuuint64_t(extent.rows), cuuint64_t(extent.matrices)};
  const cuuint64_t strides[] = {cuuint64_t(extent.columns * bytes), cuuint64_t(extent.columns * extent.rows * bytes)};
  const cuuint32_t box[] = {cuuint32_t(kBoxBytes / bytes), cuuint32_t(box_rows), 1}, step[] = {1, 1, 1};
  const CUresult result = encode(map, type, 3, const_cast<void*>(data), dims, strides, box, step,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? "" : "cuTensorMapEncodeTiled failed with " + std::to_string(result);
}

}  // namespace jax_fp8
