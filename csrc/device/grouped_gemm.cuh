// d = alpha a bᵀ + bias + c of FP8 matrices on the tensor cores of compute capability 9.0. Each operand has one scale;
// or a has one for each line of 128 elements along k, and b one for each square of 128 x 128.
//
//     a, b ─copies→ stages in shared memory ─tensor cores→ sums of 128 products ─times their scales→ sums, float32
//          ─alpha, bias, c→ d
//
// The kernel is persistent: a block computes tiles of 128 x 256 one after the other, in the order of
// grouped_gemm_tiles.cuh. It has three warpgroups. One thread of the first is the producer: it issues a copy whenever a
// stage of shared memory is free. The two others are consumers, and multiply 64 rows each.
//
// The tensor cores accumulate FP8 products with fewer bits than float32 has. So by tile, a warpgroup scales the sum of
// each 128 products and adds it up in float32 registers. Meanwhile the tensor cores work for the other warpgroup.
//
// The two blocks of a cluster read the same rows of b. Each copies one half of them to both blocks (multicast),
// which halves the reads of b. grouped_gemm_results.cuh stores the sums.
#pragma once

#include <cstdint>

#include "../grouped_gemm.h"
#include "async_copy.cuh"
#include "cluster.cuh"
#include "grouped_gemm_results.cuh"
#include "grouped_gemm_shared.cuh"
#include "grouped_gemm_tiles.cuh"
#include "warpgroup.cuh"

namespace jax_fp8::grouped_gemm {

// Registers of a thread. The copying warpgroup gives most of its registers to those that multiply, which hold 128 sums
// and 64 products a thread.
constexpr int kRegistersToCopy = 40, kRegistersToMultiply = 232;

// A position in the ring of stages: the stage, and the parity of the phase of its barriers.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// ---- the warpgroup that copies --------------------------------------------------------------------------------------

// Where both blocks need the same rows of b, each copies one half of them to both. Otherwise each copies all of its
// own.
template <Groups kGroups>
__device__ void copy(const Arguments& arguments, const GemmTiles<kGroups>& tiles, Shared& shared, int block) {
  constexpr uint16_t kBoth = 3;
  Turn turn;
  for (int pair = blockIdx.x / 2; pair < tiles.pairs(); pair += gridDim.x / 2) {
    const GemmTile tile = tiles.tile(pair, block);
    for (int depth = tile.first_depth; depth < tile.end_depth; depth += kTileDepth, turn.advance()) {
      Stage& stage = shared.stages[turn.stage];
      Barrier& filled = shared.filled[turn.stage];
      wait(shared.emptied[turn.stage], turn.parity ^ 1);
      arrive_and_expect(filled, sizeof(Stage));
      load_box(arguments.a, {depth, tile.row, 0}, stage.a, filled);
      if (tile.shares_b) {
        const Corner half = {depth, tile.column + block * kColumnsOfProduct, tile.b_matrix};
        load_box(arguments.b, half, stage.b[block], filled, kBoth);
      } else {
        for (int half = 0; half < kHalves; ++half) {
          const Corner corner = {depth, tile.column + half * kColumnsOfProduct, tile.b_matrix};
          load_box(arguments.b, corner, stage.b[half], filled);
        }
      }
    }
  }
}

// ---- the warpgroups that multiply -----------------------------------------------------------------------------------

// The scales of one step along k: of this thread's two rows of a, and of the two halves of b's rows.
struct StepScales {
  float rows[2], halves[kHalves];
};

class ScalesOfSteps {
 public:
  __device__ ScalesOfSteps(const Arguments& arguments, const GemmTile& tile, int warpgroup) {
    const ProductShape& shape = arguments.shape;
    const int row = tile.row + warpgroup * kRowsOfWarpgroup + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const int step = tile.first_depth / kTileDepth;
    const int square = tile.column / kColumnsOfProduct, squares = parts_of(shape.n, kColumnsOfProduct);
    rows_ = arguments.a_scale + int64_t{step} * arguments.a_scale_row + min(row, shape.m - 1);
    second_row_ = row + 8 < shape.m ? 8 : 0;
    halves_ = arguments.b_scale + tile.b_matrix * arguments.b_scale_matrix + square * arguments.b_scale_row + step;
    second_half_ = square + 1 < squares ? static_cast<int>(arguments.b_scale_row) : 0;
    next_row_ = static_cast<int>(arguments.a_scale_row);
  }

  __device__ StepScales load_and_advance() {
    const StepScales scales = {{__ldg(rows_), __ldg(rows_ + second_row_)},
                               {__ldg(halves_), __ldg(halves_ + second_half_)}};
    rows_ += next_row_;
    ++halves_;
    return scales;
  }

 private:
  const float *rows_, *halves_;
  int second_row_, second_half_, next_row_;
};

// Starts the 64 x 128 products of one step along k. The registers hold them only after `wait_for_products`.
template <Fp8Type kA, Fp8Type kB>
__device__ inline void multiply_step(Products& products, uint64_t a, uint64_t b, bool adds) {
  constexpr int kSteps = kTileDepth / kDepthOfProduct, kUnits = kDepthOfProduct / 16;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    multiply<kA, kB>(products, a + i * kUnits, b + i * kUnits, adds || i > 0);
  }
}

// The descriptors by which the tensor cores find a stage's operands: the warpgroup's rows of a, and one half of b. They
// address shared memory in units of 16 bytes.
struct StageOperands {
  uint64_t a, b;

  __device__ StageOperands(const Shared& shared, int warpgroup)
      : a(rows_in_shared(shared.stages[0].a[warpgroup])), b(rows_in_shared(shared.stages[0].b[0])) {}

  __device__ uint64_t a_of(int stage) const { return a + stage * (sizeof(Stage) / 16); }
  __device__ uint64_t b_of(int stage, int half) const {
    return b + stage * (sizeof(Stage) / 16) + half * (kColumnsOfProduct * kTileDepth / 16);
  }
};

// Tells the producers of both blocks that this warp has read the stage: lanes 0 and 1 arrive, each in one block.
__device__ inline void release(Shared& shared, int stage) {
  if (threadIdx.x % 32 < 2) arrive_in_block(shared.emptied[stage], threadIdx.x % 32);
}

__device__ inline void hold(Products (&sums)[kHalves]) {
#pragma unroll
  for (Products& half : sums) hold(half);
}

__device__ inline void clear(Products (&sums)[kHalves]) {
#pragma unroll
  for (Products& half : sums) half = {};
}

// Adds up the sum of each 128 products times their scales. The loads of the next scales and the wait for the next stage
// come while the tensor cores work.
template <Fp8Type kA, Fp8Type kB>
__device__ void sum_by_tile(const Arguments& arguments, const GemmTile& tile, Shared& shared, Turn& turn, int warpgroup,
                            Products (&sums)[kHalves]) {
  const int steps = parts_of(tile.end_depth - tile.first_depth, kTileDepth);
  const StageOperands operands(shared, warpgroup);
  ScalesOfSteps scales_of_steps(arguments, tile, warpgroup);
  StepScales next = {};
  if (steps > 0) {
    next = scales_of_steps.load_and_advance();
    wait(shared.filled[turn.stage], turn.parity);
  }
  for (int step = 0; step < steps; ++step) {
    const StepScales scales = next;
    const Turn now = turn;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      Products products;
      hold(products);
      begin_products();
      multiply_step<kA, kB>(products, operands.a_of(now.stage), operands.b_of(now.stage, half), false);
      commit_products();
      if (half == 0) {
        turn.advance();
        if (step + 1 < steps) next = scales_of_steps.load_and_advance();
      } else if (step + 1 < steps) {
        wait(shared.filled[turn.stage], turn.parity);
      }
      const float factors[] = {scales.rows[0] * scales.halves[half], scales.rows[1] * scales.halves[half]};
      wait_for_products<0>();
      hold(products);
      if (half == kHalves - 1) release(shared, now.stage);
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        sums[half].of[i] = fmaf(factors[i / 2 % 2], products.of[i], sums[half].of[i]);
      }
    }
  }
}

template <Fp8Type kA, Fp8Type kB>
__device__ void sum_unscaled(const GemmTile& tile, Shared& shared, Turn& turn, int warpgroup,
                             Products (&sums)[kHalves]) {
  const StageOperands operands(shared, warpgroup);
  for (int depth = tile.first_depth; depth < tile.end_depth; depth += kTileDepth, turn.advance()) {
    wait(shared.filled[turn.stage], turn.parity);
    hold(sums);
    begin_products();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      multiply_step<kA, kB>(sums[half], operands.a_of(turn.stage), operands.b_of(turn.stage, half), true);
    }
    commit_products();
    wait_for_products<0>();
    hold(sums);
    release(shared, turn.stage);
  }
}

// ---- all of it ------------------------------------------------------------------------------------------------------

// A value that is the same in all threads of a warp. The shuffle tells the compiler so, which then need not handle
// threads that leave a loop at different times.
__device__ inline int in_common(int value) { return __shfl_sync(0xffffffff, value, 0); }

template <Groups kGroups, Fp8Type kA, Fp8Type kB, bool kByTile, typename D>
__device__ void multiply_tiles(const Arguments& arguments, const GemmTiles<kGroups>& tiles, Shared& shared, int block) {
  const int warpgroup = in_common(threadIdx.x / 128) - 1;
  Results<D> results(arguments, shared, warpgroup);
  const float scale = kByTile ? 1.0f : __ldg(arguments.a_scale) * __ldg(arguments.b_scale);
  Turn turn;
  for (int pair = blockIdx.x / 2; pair < tiles.pairs(); pair += gridDim.x / 2) {
    GemmTile tile = tiles.tile(pair, block);
    tile.first_depth = in_common(tile.first_depth);
    tile.end_depth = in_common(tile.end_depth);
    results.begin(tile);
    Products sums[kHalves];
    clear(sums);
    if constexpr (kByTile) {
      sum_by_tile<kA, kB>(arguments, tile, shared, turn, warpgroup, sums);
    } else {
      sum_unscaled<kA, kB>(tile, shared, turn, warpgroup, sums);
    }
    if (!tile.has_group) clear(sums);
    results.write(tile, arguments.alpha * scale, sums);
  }
  results.end();
}

template <Groups kGroups, Fp8Type kA, Fp8Type kB, bool kByTile, typename D>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Arguments arguments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(reinterpret_cast<uintptr_t>(bytes + 1023) & ~uintptr_t{1023});
  const int block = blockIdx.x % 2;
  GemmTiles<kGroups> tiles = {arguments.shape, nullptr};
  if constexpr (kGroups != Groups::kNone) {
    for (int i = threadIdx.x; i <= arguments.shape.groups; i += kThreads) shared.starts[i] = arguments.starts[i];
    tiles.starts = shared.starts;
  }
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      start(shared.filled[stage], 1);
      start(shared.emptied[stage], 2 * 4 * kWarpgroups);  // one arrival of each multiplying warp of both blocks
    }
    for (Barrier& arrived : shared.c_arrived) start(arrived, 1);
    publish_barriers();
  }
  __syncthreads();
  arrive_at_cluster();
  wait_for_cluster();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegistersToCopy));
    if (threadIdx.x == 0) copy(arguments, tiles, shared, block);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegistersToMultiply));
    multiply_tiles<kGroups, kA, kB, kByTile, D>(arguments, tiles, shared, block);
  }
  arrive_at_cluster();  // a block must not exit while the other may still copy to it, or arrive at its barriers
  wait_for_cluster();
#else
  __trap();
#endif
}

}  // namespace jax_fp8::grouped_gemm
