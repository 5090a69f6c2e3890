// The weights of a GEMM of few rows where one instruction copies a box of them: 128 elements of k of all the block's
// rows (TMA, compute capability 9.0).
//
// A thread that asks for more than memory brings has to wait. So a warp of its own asks for the weights of all others,
// which meanwhile prepare their rows. The warps with the same part of k share a ring. Each of its slots has two
// barriers: one counts the bytes that arrive, the other the warps that have used them.
//
// A box is swizzled: of row r, the 16 bytes with the number i lie at place i ^ (r mod 8). A lane reads those with the
// numbers 2 t and 2 t + 1. So a quarter of a warp, which reads two rows at once, finds those of one row at even places
// and those of the other at odd ones, and no bank twice.
#pragma once

#include <cstdint>

#include "async_copy.cuh"
#include "few_rows_gemm_plan.cuh"
#include "few_rows_gemm_weights.cuh"

namespace jax_fp8::few_rows_gemm {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasBoxes = false;
#else
constexpr bool kHasBoxes = true;
#endif

struct RingBarriers {
  Barrier arrived[kMostStages], used[kMostStages];
};

// All threads must call it, with a barrier behind it.
__device__ inline void start_rings(const Arguments& arguments, RingBarriers* rings) {
  const int ring = static_cast<int>(threadIdx.x) / 32, slot = static_cast<int>(threadIdx.x) % 32;
  if (slot >= arguments.course.stages || ring >= arguments.plan.depth_warps) return;
  start(rings[ring].arrived[slot], 1);
  start(rings[ring].used[slot], arguments.plan.row_warps);
  publish_barriers();
}

// What one thread does that asks for weights: for each step those of all warps, as soon as a slot is free.
__device__ inline void fetch_boxes(const Arguments& arguments, Part part, uint8_t* ring, RingBarriers* rings) {
  const int step_chunks = arguments.plan.step_chunks, box_bytes = arguments.course.block_rows * kChunk;
  int slot = 0;
  uint32_t parity = 1;  // of a slot that was never used
#pragma unroll 1
  for (int step = 0; step < arguments.course.steps; ++step) {
    uint8_t* box = ring + slot * arguments.layout.stage;
#pragma unroll 1
    for (part.depth_warp = 0; part.depth_warp < arguments.plan.depth_warps; ++part.depth_warp) {
      const int first = chunk_of(arguments, part, step), chunks = min(step_chunks, part.chunks - first);
      RingBarriers& barriers = rings[part.depth_warp];
      if (chunks <= 0) break;
      wait(barriers.used[slot], parity);
      arrive_and_expect(barriers.arrived[slot], chunks * box_bytes);
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int depth = (part.first_chunk + first + chunk) * kChunk;
        uint8_t* const target = box + chunk * box_bytes;
        if (arguments.problem.gated) {  // rows of the gate, and the same ones of the linear part
          load_box(arguments.weights, {depth, part.first_row / 2, 0}, target, barriers.arrived[slot]);
          load_box(arguments.weights, {depth, part.first_row / 2 + arguments.course.d_columns, 0},
                   target + box_bytes / 2, barriers.arrived[slot]);
        } else {
          load_box(arguments.weights, {depth, part.first_row, 0}, target, barriers.arrived[slot]);
        }
      }
      box += step_chunks * box_bytes;
    }
    if (++slot == arguments.course.stages) slot = 0, parity ^= 1;
  }
}

// The ring as the warp sees it that multiplies.
template <int kRowTiles>
class BoxedWeights {
 public:
  __device__ BoxedWeights(const Arguments& arguments, const Part& part, uint8_t* ring, RingBarriers* rings)
      : part_(part), barriers_(rings[part.depth_warp]), stage_(arguments.layout.stage),
        box_bytes_(arguments.course.block_rows * kChunk),
        tile_bytes_((arguments.problem.gated ? arguments.plan.row_warps : 1) * kWarpRows * kChunk),
        elements_(ring + part.depth_warp * arguments.plan.step_chunks * box_bytes_) {
    const int g = part.lane / 4, t = part.lane % 4;
    const int row = part.row_warp * (arguments.problem.gated ? 1 : kRowTiles) * kWarpRows + g;
    elements_ += row * kChunk + ((2 * t) ^ g) * kLaneBytes;
  }

  __device__ void wait_for(int slot, uint32_t parity) {
    wait(barriers_.arrived[slot], parity);
    of_slot_ = elements_ + slot * stage_;
  }

  // The lane's elements of row g, or g + 8, of a tile: of its 32 neighbours along k the first or the second half.
  __device__ uint4 read(int chunk, int tile, int lower, int half) const {
    const uint8_t* const first = of_slot_ + chunk * box_bytes_ + tile * tile_bytes_ + lower * (8 * kChunk);
    return read_four(half == 0 ? first : first + odd_);
  }

  __device__ void release(int slot) {
    __syncwarp();
    if (part_.lane == 0) arrive_in_block(barriers_.used[slot], part_.rank);
  }

 private:
  const Part& part_;
  RingBarriers& barriers_;
  const int stage_, box_bytes_, tile_bytes_;
  const uint8_t *elements_, *of_slot_;
  const int odd_ = part_.lane / 4 % 2 == 0 ? kLaneBytes : -kLaneBytes;  // from an even place to the odd one beside it
};

}  // namespace jax_fp8::few_rows_gemm
