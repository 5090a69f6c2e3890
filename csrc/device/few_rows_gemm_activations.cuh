// The activations of a GEMM of few rows: all warps of a block read them in shared memory, where they copy them in
// phases.
#pragma once

#include <cstdint>

#include "few_rows_gemm_plan.cuh"
#include "few_rows_gemm_weights.cuh"
#include "own_slots.cuh"

namespace jax_fp8::few_rows_gemm {

// A place in a table whose rows have `width` places, for threads that fill it together.
struct Place {
  int row, column;

  __device__ explicit Place(const Divisor& width)
      : row(quotient(threadIdx.x, width)), column(static_cast<int>(threadIdx.x) - row * width.divisor) {}

  __device__ void advance(int width, int by_rows, int by_columns) {
    row += by_rows, column += by_columns;
    if (column >= width) column -= width, ++row;
  }
};

// The step at which a warp is: the slot of its phase, and which of the phase's steps it is.
struct Turn {
  int slot, step_of_phase, phase;
};

// Phases of activations, which all threads copy, with the scales of their lines.
template <int kElementBytes, Scaling kScaling, int kRowGroups>
class Activations {
 public:
  __device__ Activations(const Arguments& arguments, const Part& part, uint8_t* shared)
      : arguments_(arguments), part_(part), shared_(shared),
        phase_chunks_(arguments.plan.phase_steps * arguments.plan.depth_warps) {}

  // Starts the copies of a phase, for the batch that ends next. Behind the end of k are zeros.
  __device__ void fetch_phase(int phase, int to_slot) {
    const int m = arguments_.problem.m, k = arguments_.problem.k;
    const Divisor& divisor = arguments_.course.phase_vectors;
    const int width = divisor.divisor, threads = arguments_.course.threads;
    const int by_rows = quotient(threads, divisor), by_columns = threads - by_rows * width;
    const int first = first_chunk(phase) * kChunk;
    const auto* const a = static_cast<const uint8_t*>(arguments_.operands.a);
    uint8_t* const target = slot(to_slot);
    for (Place place(divisor); place.row < m; place.advance(width, by_rows, by_columns)) {
      const int depth = first + place.column * kVector;
      if (depth < k) {
        const uint8_t* const source = a + (int64_t{place.row} * k + depth) * kElementBytes;
        fetch(at(target, place), reinterpret_cast<const uint4*>(source));
      } else {
        *at(target, place) = make_uint4(0, 0, 0, 0);
      }
    }
    if constexpr (kScaling == Scaling::kLines) fetch_scales(phase, to_slot);
  }

  // Where the lane's 16 elements of the first row lie, of the first half of this warp's chunk.
  __device__ const uint8_t* elements(const Turn& turn) const {
    return slot(turn.slot) + chunk_of(turn) * kChunk * kElementBytes + part_.lane % 4 * 16 * kElementBytes;
  }

  // The scales of the lane's two rows of the first group of 8; 4 further on are those of the next group.
  __device__ const float2* scales(const Turn& turn) const {
    const uint8_t* const first = slot(turn.slot) + arguments_.layout.phase_scales;
    return reinterpret_cast<const float2*>(first) + chunk_of(turn) * kRowGroups * 4 + part_.lane % 4;
  }

  __device__ uint8_t* slot(int number) const { return shared_ + number * arguments_.layout.phase; }

 private:
  static constexpr int kVector = 16 / kElementBytes;  // elements

  __device__ int first_chunk(int phase) const { return part_.first_chunk + phase * phase_chunks_; }

  __device__ int chunk_of(const Turn& turn) const {
    return turn.step_of_phase * arguments_.plan.depth_warps + part_.depth_warp;
  }

  __device__ uint4* at(uint8_t* target, const Place& place) const {
    return reinterpret_cast<uint4*>(target + place.row * arguments_.layout.phase_row) + place.column;
  }

  __device__ void fetch_scales(int phase, int to_slot) {
    const int fours = (arguments_.problem.m + 3) / 4;
    auto* const target = reinterpret_cast<uint4*>(slot(to_slot) + arguments_.layout.phase_scales);
    const auto* const source = reinterpret_cast<const uint4*>(arguments_.operands.a_scale);
    for (int i = threadIdx.x; i < phase_chunks_ * fours; i += arguments_.course.threads) {
      const int chunk = i / fours, four = i % fours;
      if (first_chunk(phase) + chunk >= arguments_.course.all_chunks) break;
      fetch(target + chunk * kRowGroups * 2 + four, source + (int64_t{first_chunk(phase)} + chunk) * fours + four);
    }
  }

  const Arguments& arguments_;
  const Part& part_;
  uint8_t* const shared_;
  const int phase_chunks_;
};

}  // namespace jax_fp8::few_rows_gemm
