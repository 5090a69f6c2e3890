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

// Matrices lie one after the other in memory, or side by side: then the first rows of all of them come first.
struct Extent {
  int64_t columns, rows, matrices;
  bool side_by_side = false;
};

// Makes a map with dims from the innermost on; `strides` in bytes are those of all but that one.
template <size_t kRank>
std::string encode_map(CUtensorMap* map, const void* data, CUtensorMapDataType type, const cuuint64_t (&dims)[kRank],
                       const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  const Encode encode = find_encode();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12 or newer";
  cuuint32_t step[kRank];
  for (cuuint32_t& one : step) one = 1;
  const CUresult result = encode(map, type, kRank, const_cast<void*>(data), dims, strides, box, step,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? "" : "cuTensorMapEncodeTiled failed with " + std::to_string(result);
}

// Makes a tensor map of row-major matrices. A copy moves a box of them, whose rows have 128 bytes: the width of the
// swizzle that the tensor cores read.
inline std::string describe(CUtensorMap* map, const void* data, CUtensorMapDataType type, int bytes, Extent extent,
                            int box_rows) {
  const int64_t row_bytes = extent.columns * bytes;
  const cuuint64_t next_row = row_bytes * (extent.side_by_side ? extent.matrices : 1);
  const cuuint64_t next_matrix = row_bytes * (extent.side_by_side ? 1 : extent.rows);
  return encode_map<3>(map, data, type,
                       {cuuint64_t(extent.columns), cuuint64_t(extent.rows), cuuint64_t(extent.matrices)},
                       {next_row, next_matrix}, {cuuint32_t(kBoxBytes / bytes), cuuint32_t(box_rows), 1});
}

// Makes a tensor map of such matrices with one byte an element, of which one copy moves several neighbouring boxes: the
// same rows of all matrices, and so many chunks of 128 columns. The box has those of one chunk after those of another.
// With several chunks, columns must be a multiple of 128; else a chunk would go on in the next row.
inline std::string describe_chunks(CUtensorMap* map, const void* data, Extent extent, int box_rows, int box_chunks) {
  const bool has_chunks = box_chunks > 1;
  return encode_map<4>(
      map, data, CU_TENSOR_MAP_DATA_TYPE_UINT8,
      {cuuint64_t(has_chunks ? kBoxBytes : extent.columns), cuuint64_t(extent.rows), cuuint64_t(extent.matrices),
       cuuint64_t(has_chunks ? extent.columns / kBoxBytes : 1)},
      {cuuint64_t(extent.columns), cuuint64_t(extent.columns * extent.rows), cuuint64_t(kBoxBytes)},
      {cuuint32_t(kBoxBytes), cuuint32_t(box_rows), cuuint32_t(extent.matrices), cuuint32_t(box_chunks)});
}

}  // namespace jax_fp8
