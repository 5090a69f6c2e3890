// The shared memory of a block of device/grouped_gemm.cuh: a ring of stages that copies fill and tensor cores read, the
// boxes of results, and the barriers.
#pragma once

#include <cstdint>

#include "async_copy.cuh"
#include "grouped_gemm_tiles.cuh"
#include "warpgroup.cuh"

namespace jax_fp8::grouped_gemm {

constexpr int kWarpgroups = 2, kThreads = 128 * (1 + kWarpgroups);  // two multiply, and one copies
constexpr int kStages = 3;
constexpr int kHalves = kTileColumns / kColumnsOfProduct;
constexpr int kBoxes = 4, kBoxBytes = kRowsOfWarpgroup * kSwizzleBytes;  // of a result, in shared memory

// The operands of one step along k: 128 x 128 of a and 256 x 128 of b, 48 KB.
struct Stage {
  uint8_t a[kWarpgroups][kRowsOfWarpgroup * kTileDepth], b[kHalves][kColumnsOfProduct * kTileDepth];
};

struct Shared {
  Stage stages[kStages];
  uint8_t results[kWarpgroups][kBoxes][kBoxBytes];  // c, which d replaces
  uint32_t bias[kWarpgroups][kTileColumns / 2];     // two elements in a word
  Barrier filled[kStages], emptied[kStages], c_arrived[kWarpgroups];
  int32_t starts[kMaxGroups + 1];
};

constexpr int kSharedBytes = sizeof(Shared) + 1024;  // room to align to 1,024 bytes, which the swizzle needs

}  // namespace jax_fp8::grouped_gemm
