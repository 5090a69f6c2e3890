// The products of a GEMM of few rows by warpgroups (wgmma, compute capability 9.0 alone), where a is E4M3: 64 rows of b
// by 8, 16, 32 or 64 rows of a at once, both in boxes.
//
// A step's boxes of a lie behind those of b, in the same slot of the ring and behind the same barrier. The weights of
// the first slots are asked for before the kernels that make a have ended, and their rows of a afterwards.
//
// The tensor cores accumulate FP8 products with fewer bits than float32 has. So the sum of each 128 products is added
// up in float32 registers, with the scales of its tiles where these have some. A warp's sums lie as those of mma.sync:
// warp w of a warpgroup has a tile of 16 rows of b. With gates, the first half of a box has rows of the gate, and the
// second one the same rows of the linear part.
#pragma once

#include <cstdint>

#include "async_copy.cuh"
#include "few_rows_gemm_boxes.cuh"
#include "few_rows_gemm_plan.cuh"
#include "few_rows_gemm_results.cuh"
#include "few_rows_gemm_weights.cuh"
#include "programmatic.cuh"
#include "warpgroup.cuh"

namespace jax_fp8::few_rows_gemm {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasWarpgroups = true;
#else
constexpr bool kHasWarpgroups = false;
#endif

// What one thread does that asks for weights and rows: each copy brings as many chunks as it can.
class BoxesOfBoth {
 public:
  __device__ BoxesOfBoth(const Arguments& arguments, const Part& part, uint8_t* ring, RingBarriers* rings)
      : arguments_(arguments), part_(part), ring_(ring), rings_(rings),
        b_bytes_(arguments.course.block_rows * kChunk), a_bytes_(arguments.course.box_rows * kChunk) {}

  __device__ void fetch() {
    const int steps = arguments_.course.steps, early = min(arguments_.course.stages, steps);
#pragma unroll 1
    for (int step = 0; step < early; ++step) fetch_weights(step, step, 1);  // the parity of a slot that was never used
    wait_for_kernels_before();
#pragma unroll 1
    for (int step = 0; step < early; ++step) fetch_rows(step, step);
    int slot = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int step = early; step < steps; ++step) {
      fetch_weights(step, slot, parity);
      fetch_rows(step, slot);
      if (++slot == arguments_.course.stages) slot = 0, parity ^= 1;
    }
  }

 private:
  // As soon as the warps have used what the slot had before.
  __device__ void fetch_weights(int step, int slot, uint32_t parity) {
    const int row = part_.first_row / arguments_.course.parts;
    for_rings(step, slot, [&](int chunk, uint8_t* boxes, RingBarriers& ring) {
      wait(ring.used[slot], parity);
      arrive_and_expect(ring.arrived[slot], arguments_.plan.step_chunks * (b_bytes_ + a_bytes_));
      load(arguments_.weights, chunk, row, boxes, b_bytes_, ring.arrived[slot]);
    });
  }

  __device__ void fetch_rows(int step, int slot) {
    for_rings(step, slot, [&](int chunk, uint8_t* boxes, RingBarriers& ring) {
      load(arguments_.rows, chunk, 0, boxes + arguments_.plan.step_chunks * b_bytes_, a_bytes_, ring.arrived[slot]);
    });
  }

  // The chunks of a step. Those behind the block's last one are not multiplied.
  __device__ void load(const CUtensorMap& map, int chunk, int row, uint8_t* box, int bytes, Barrier& arrived) const {
    const int step_chunks = arguments_.plan.step_chunks;
    if (arguments_.course.has_chunk_boxes) return load_chunks(map, ChunkCorner{0, row, 0, chunk}, box, arrived);
#pragma unroll 1
    for (int i = 0; i < step_chunks; ++i) {
      load_chunks(map, ChunkCorner{(chunk + i) * kChunk, row, 0, 0}, box + i * bytes, arrived);
    }
  }

  // Calls function(first chunk of the step, its boxes, barriers) for each warpgroup along k.
  template <typename Function>
  __device__ void for_rings(int step, int slot, Function function) {
    const int step_chunks = arguments_.plan.step_chunks;
    uint8_t* boxes = ring_ + slot * arguments_.layout.stage;
    Part part = part_;
#pragma unroll 1
    for (part.depth_warp = 0; part.depth_warp < arguments_.plan.depth_warps; ++part.depth_warp) {
      const int chunk = chunk_of(arguments_, part, step);
      if (chunk >= part.chunks) break;
      function(part.first_chunk + chunk, boxes, rings_[part.depth_warp]);
      boxes += step_chunks * (b_bytes_ + a_bytes_);
    }
  }

  const Arguments& arguments_;
  const Part& part_;
  uint8_t* const ring_;
  RingBarriers* const rings_;
  const int b_bytes_, a_bytes_;  // of a chunk
};

// What a warpgroup multiplies. It has 64 of the block's rows of b, and turns at the chunks along k.
template <Scaling kScaling, int kRowGroups>
class WarpgroupProduct {
 public:
  __device__ WarpgroupProduct(const Arguments& arguments, const Part& part, uint8_t* shared, RingBarriers* rings)
      : arguments_(arguments), part_(part), barriers_(rings[part.depth_warp]) {
    const int b_bytes = arguments.course.block_rows * kChunk, step_chunks = arguments.plan.step_chunks;
    const uint8_t* const boxes =
        shared + arguments.layout.ring + part.depth_warp * step_chunks * (b_bytes + kBoxRows * kChunk);
    b_ = rows_in_shared(boxes + part.row_warp / kWarps * kRowsOfWarpgroup * kChunk);
    a_ = rows_in_shared(boxes + step_chunks * b_bytes);
  }

  __device__ void start_early() const {}
  __device__ void start() const { end_batch(); }  // of bias and c

  __device__ void make(Sums<kRowGroups, 1>& sums) const {
    const int step_chunks = arguments_.plan.step_chunks;
    int slot = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int step = 0; step < arguments_.course.steps; ++step) {
      const int first = chunk_of(arguments_, part_, step);
      if (first >= part_.chunks) break;
      wait(barriers_.arrived[slot], parity);
#pragma unroll 1
      for (int chunk = 0; chunk < step_chunks && first + chunk < part_.chunks; ++chunk) {
        const int stage = slot * (arguments_.layout.stage / 16);
        add(first + chunk, b_ + stage + chunk * (arguments_.course.block_rows * kChunk / 16),
            a_ + stage + chunk * (kBoxRows * kChunk / 16), sums);
      }
      __syncwarp();
      if (part_.lane == 0) arrive_in_block(barriers_.used[slot], part_.rank);
      if (++slot == arguments_.course.stages) slot = 0, parity ^= 1;
    }
    wait_for_all_but<0>();
  }

 private:
  static constexpr int kWarps = kRowsOfWarpgroup / kWarpRows, kBoxRows = kRowGroups * 8;

  // The products of one chunk, from their descriptors.
  __device__ void add(int chunk, uint64_t b, uint64_t a, Sums<kRowGroups, 1>& sums) const {
    FewColumns<kBoxRows> products;
    hold(products);
    begin_products();
#pragma unroll
    for (int i = 0; i < kChunk / kDepthOfProduct; ++i) {
      multiply(products, b + i * (kDepthOfProduct / 16), a + i * (kDepthOfProduct / 16), i > 0);
    }
    commit_products();
    float2 scales[kRowGroups];
    if constexpr (kScaling == Scaling::kLines) load_scales(chunk, scales);
    jax_fp8::wait_for_products<0>();
    hold(products);
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = sums[0][group][i];
        const float product = products.of[4 * group + i];
        if constexpr (kScaling == Scaling::kLines) {
          sum = __fmaf_rn(product, i % 2 == 0 ? scales[group].x : scales[group].y, sum);
        } else {
          sum = __fadd_rn(sum, product);
        }
      }
    }
  }

  // Of the lane's two rows of each group, times that of the square.
  __device__ void load_scales(int chunk, float2 (&scales)[kRowGroups]) const {
    const float square = square_scale(arguments_, part_, chunk);
    const int rows = (arguments_.problem.m + 3) / 4 * 4;
    const float* const lines = arguments_.operands.a_scale + int64_t{part_.first_chunk + chunk} * rows;
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const int row = group * 8 + part_.lane % 4 * 2;
      const float2 two = row < rows ? __ldcg(reinterpret_cast<const float2*>(lines + row)) : float2{0, 0};
      scales[group] = {__fmul_rn(two.x, square), __fmul_rn(two.y, square)};
    }
  }

  const Arguments& arguments_;
  const Part& part_;
  RingBarriers& barriers_;
  uint64_t b_, a_;  // descriptors of the first slot
};

}  // namespace jax_fp8::few_rows_gemm
