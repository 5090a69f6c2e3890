// The weights of a GEMM of few rows, on their way from memory to the registers of a lane: a ring in shared memory that
// needs no barrier, since each lane reads only what it has copied itself. few_rows_gemm_boxes.cuh has another.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../few_rows_gemm.h"
#include "few_rows_gemm_plan.cuh"
#include "own_slots.cuh"

namespace jax_fp8::few_rows_gemm {

// The kernel's parameter.
struct Arguments {
  CUtensorMap weights, rows;  // in boxes: b, and a
  Problem problem;
  Operands operands;
  Plan plan;
  Course course;
  Layout layout;
  bool follows;  // whether kernels before this one may still run when it begins
};

// A barrier of the threads that multiply.
__device__ inline void wait_for_products(const Arguments& arguments) {
  asm volatile("bar.sync %0, %1;" ::"r"(1), "r"(arguments.course.threads) : "memory");
}

// Waits until all batches of this thread but the latest kCount have arrived.
template <int kCount>
__device__ inline void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kCount) : "memory");
}

__device__ inline uint4 read_four(const uint8_t* shared) { return *reinterpret_cast<const uint4*>(shared); }

// Of a number below 2**16.
__device__ inline int quotient(int number, const Divisor& by) {
  const uint64_t product = uint64_t{static_cast<uint32_t>(number)} * by.inverse;
  return by.inverse == 0 ? number : static_cast<int>(product >> 32);
}

__device__ inline int remainder_of(int number, const Divisor& by) {
  return number - quotient(number, by) * by.divisor;
}

// A load that the compiler does not move.
__device__ inline float load_now(const float* source) {
  float loaded;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(loaded) : "l"(source));
  return loaded;
}

// This block's part of k and this warp's rows of b.
struct Part {
  int rank, first_row, first_chunk, chunks;  // the block's rank in its cluster; the block's first row of b
  int warp, row_warp, depth_warp, lane;

  __device__ explicit Part(const Arguments& arguments) {
    const Plan& plan = arguments.plan;
    const int block = static_cast<int>(blockIdx.x);
    rank = block & (plan.cluster - 1);
    first_row = (block >> arguments.course.log2_cluster) * arguments.course.block_rows;
    first_chunk = rank * arguments.course.chunks;
    chunks = min(arguments.course.chunks, arguments.course.all_chunks - first_chunk);
    set_warp(arguments, static_cast<int>(threadIdx.x) / 32);
    lane = static_cast<int>(threadIdx.x) % 32;
  }

  __device__ void set_warp(const Arguments& arguments, int number) {
    // Of neighbours along k, or of warpgroups of neighbours along the rows of b.
    const int together = arguments.plan.way == Way::kWarpgroups ? 4 : 1, group = number / together;
    const int row_group = quotient(group, arguments.course.depth_warps);
    warp = number, row_warp = row_group * together + number % together;
    depth_warp = group - row_group * arguments.plan.depth_warps;
  }
};

// Starts an asynchronous copy of 16 bytes to shared memory, and of 128 to L2: the neighbours are needed at once too.
__device__ inline void fetch_weights(void* shared, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], %2;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(source), "n"(16)
               : "memory");
}

// The row of b that is row `row` of this warp. A row behind the last one is that again; its sums are not written. With
// gates, the first tile of a warp has rows of the gate, and the second the same ones of the linear part.
__device__ inline const uint8_t* weights_of(const Arguments& arguments, const Part& part, int row_tiles, int row) {
  const bool gated = arguments.problem.gated;
  const int columns = arguments.course.d_columns, tile = row / kWarpRows;
  const int first = gated ? part.first_row / 2 + part.row_warp * kWarpRows
                          : part.first_row + (part.row_warp * row_tiles + tile) * kWarpRows;
  const int64_t within = min(first, columns - kWarpRows) + (gated ? tile * columns : 0) + row % kWarpRows;
  return static_cast<const uint8_t*>(arguments.operands.b) + within * arguments.problem.k;
}

// The chunk of this block's part of k with which a step of the warp begins.
__device__ inline int chunk_of(const Arguments& arguments, const Part& part, int step) {
  return (step * arguments.plan.depth_warps + part.depth_warp) * arguments.plan.step_chunks;
}

// The scale of a square: a chunk of this block.
__device__ inline float square_scale(const Arguments& arguments, const Part& part, int chunk) {
  const int64_t row = (arguments.course.all_chunks + 3) / 4 * 4;
  return __ldg(arguments.operands.b_scale + part.first_row / kSquareRows * row + part.first_chunk + chunk);
}

// What the lane copies ahead, in a ring of batches.
template <int kRowGroups, int kRowTiles>
class Weights {
 public:
  static constexpr int kStages = stages_of(kRowGroups, kRowTiles);

  __device__ Weights(const Arguments& arguments, const Part& part, uint8_t* shared)
      : arguments_(arguments), part_(part), slots_(shared + arguments.layout.ring + threadIdx.x * kLaneBytes) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      rows_[tile] = weights_of(arguments, part, kRowTiles, tile * kWarpRows + part.lane / 4);
    }
  }

  // Into a slot of the ring, as a batch.
  __device__ void fetch(int step, int slot) {
    const int chunk = chunk_of(arguments_, part_, step);
    if (chunk < part_.chunks) {
      const int k = arguments_.problem.k;
      const int64_t below = int64_t{8} * k;
      uint8_t* const target = slots_ + slot * arguments_.layout.stage;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Behind the end of k the activations are zeros. What they are multiplied by must be a number, or a NaN that
        // this row of b has anyway.
        const int depth = (part_.first_chunk + chunk) * kChunk + half * 64 + part_.lane % 4 * kLaneBytes;
        const int within = min(depth, k - kLaneBytes);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          fetch_weights(target + offset(tile, 0, half), rows_[tile] + within);
          fetch_weights(target + offset(tile, 1, half), rows_[tile] + below + within);
        }
      }
    }
    end_batch();
  }

  // Waits until the next batch is here.
  __device__ void wait_for(int slot) {
    slot_ = slots_ + slot * arguments_.layout.stage;
    wait_for_all_but<kStages - 1>();
  }

  // The lane's elements of row g, or g + 8, of a tile.
  __device__ uint4 read(int, int tile, int lower, int half) const {
    return read_four(slot_ + offset(tile, lower, half));
  }

 private:
  __device__ static int offset(int tile, int lower, int half) {
    return ((tile * 2 + lower) * 2 + half) * static_cast<int>(blockDim.x) * kLaneBytes;
  }

  const Arguments& arguments_;
  const Part& part_;
  uint8_t* const slots_;
  const uint8_t *slot_, *rows_[kRowTiles];
};

}  // namespace jax_fp8::few_rows_gemm
