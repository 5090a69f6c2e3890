// What a block of device/grouped_gemm.cuh keeps in shared memory.
#pragma once

#include <cstdint>

#include "async_copy.cuh"
#include "grouped_gemm_tiles.cuh"
#include "warpgroup.cuh"

namespace jax_fp8::grouped_gemm {

constexpr int kWarpgroups = 2, kThreads = 128 * (1 + kWarpgroups);  // those that multiply, and one that copies
constexpr int kStages = 3;
constexpr int kHalves = kTileColumns / kColumnsOfProduct;
constexpr int kBoxes = 4, kBoxBytes = kRowsOfWarpgroup * kSwizzleBytes;  // of a result, in shared memory

// One step along k.
struct Stage {
  uint8_t a[kWarpgroups][kRowsOfWarpgroup * kTileDepth], b[kHalves][kColumnsOfProduct * kTileDepth];
};

struct Shared {
  Stage stages[kStages];
  uint8_t results[kWarpgroups][kBoxes][kBoxBytes];  // d, and c before it
  uint32_t bias[kWarpgroups][kTileColumns / 2];     // two elements in a word
  Barrier filled[kStages], emptied[kStages], c_arrived[kWarpgroups];
  int32_t starts[kMaxGroups + 1];
};

constexpr int kSharedBytes = sizeof(Shared) + 1024;  // boxes begin at multiples of 1,024

}  // namespace jax_fp8::grouped_gemm
