// The part of CUDA's driver that csrc uses: tensor maps. The compiler finds this file in place of CUDA's cuda.h.
#pragma once

#include <cstdint>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT8,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

// A tensor map is as opaque as CUDA's, so its members here may differ.
struct alignas(64) CUtensorMap {
  char* data;
  uint64_t bytes;  // of an element
  uint64_t dims[4], strides[4];
  uint32_t box[4];
  bool is_swizzled;
};
static_assert(sizeof(CUtensorMap) == 128);

// Refuses the calls that the driver refuses, for the maps that csrc makes: three or four dims, and boxes of at most 256
// rows.
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                       const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const uint64_t bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  const bool is_swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  bool good = rank == 3 || rank == 4;
  good &= reinterpret_cast<uintptr_t>(data) % 16 == 0 && reinterpret_cast<uintptr_t>(map) % 64 == 0;
  for (cuuint32_t i = 0; i < rank; ++i) {
    good &= dims[i] > 0 && dims[i] <= uint64_t{1} << 32 && box[i] <= 256 && steps[i] == 1;
  }
  for (cuuint32_t i = 0; i + 1 < rank; ++i) good &= strides[i] % 16 == 0 && strides[i] < uint64_t{1} << 40;
  good &= box[0] * bytes % 16 == 0 && (!is_swizzled || box[0] * bytes <= 128);
  if (!good) return CUDA_ERROR_INVALID_VALUE;
  const bool has_four = rank == 4;
  *map = {static_cast<char*>(data),
          bytes,
          {dims[0], dims[1], dims[2], has_four ? dims[3] : 1},
          {bytes, strides[0], strides[1], has_four ? strides[2] : 0},
          {box[0], box[1], box[2], has_four ? box[3] : 1},
          is_swizzled};
  return CUDA_SUCCESS;
}
