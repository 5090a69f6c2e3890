// The products of a GEMM of few rows, d[m, n] = a[m, k] · b[n, k]ᵀ with at most 64 rows of a.
//
// b is the first operand of the tensor cores, 16 rows at a time, and 8 rows of a are the second. So a GEMM of one row
// wastes 7 of 8 multiplications, which cost nothing: memory is slower. Each weight is read once, from memory to shared
// memory and from there to the registers of one lane.
//
// Of 64 neighbours along k, lane 4 g + t copies 16, from 16 t on, of the rows g and g + 8 of b. They are its elements
// of four products: the order of k within a product is free, and the activations are read in the same order. So no
// lane needs what another one has copied, and the ring of weights needs no barrier. A chunk is two times 64 elements.
//
// The warps of a block take turns at the chunks, in steps. Activations are shared by all of them: they are copied in
// phases of several steps, with one barrier for each phase. All copies are asynchronous, so phases are ahead of their
// use by as many steps as weights.
//
//     28672 x 4096, 8 rows: 448 blocks of 8 warps and 64 rows of b, one on each multiprocessor. Up to 128 KB of weights
//     are under way to it; its share of 3.3 TB/s, times 1 us of latency, is 25 KB. A step of a warp takes some 245
//     instructions for 4 KB of weights, a quarter of what a multiprocessor issues while memory brings them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "few_rows_gemm_activations.cuh"
#include "few_rows_gemm_plan.cuh"
#include "few_rows_gemm_preparation.cuh"
#include "few_rows_gemm_results.cuh"
#include "few_rows_gemm_upcoming.cuh"
#include "few_rows_gemm_weights.cuh"
#include "mma.cuh"
#include "programmatic.cuh"
#include "vector.cuh"

namespace jax_fp8::few_rows_gemm {

// Wide is the dtype in which the tensor cores multiply: that of a, or float16 where a is E4M3.
template <typename Wide, Scaling kScaling, int kRowGroups, int kRowTiles>
class Product {
 public:
  __device__ Product(const Arguments& arguments, const Part& part, uint8_t* shared)
      : arguments_(arguments), part_(part), ahead_(min(arguments.plan.ahead, arguments.course.phases)),
        weights_(arguments, part, shared), activations_(arguments, part, shared), preparer_(arguments, part, shared) {}

  // While kernels before this one may still run: has as many weights under way as fit.
  __device__ void start_early() {
    if (has_early_weights()) fetch_weights_of(0, kStages);
  }

  // Has the first activations under way, and as many weights as fit. Activations come first: behind the weights they
  // would arrive after them, and no product could begin before. Nothing else may wait before this.
  __device__ void start() {
    square_ = square_scale(0);
    if (is_prepared()) {
      preparer_.fetch_rows();
    } else {
      for (int phase = 0; phase < ahead_; ++phase) activations_.fetch_phase(phase, phase);
      if (has_early_weights()) end_batch();
    }
    if (!has_early_weights()) fetch_weights_of(0, is_prepared() ? kFirst : kStages);
  }

  __device__ void make(Sums<kRowGroups, kRowTiles>& sums) {
    const Course& course = arguments_.course;
    const int phase_steps = arguments_.plan.phase_steps;
    if (is_prepared()) {
      if (has_early_weights()) {
        wait_for_all_but<0>();
      } else {
        wait_for_all_but<kFirst>();
      }
      __syncthreads();
      preparer_.make(activations_.slot(0), arguments_.layout.phase_row);
      if (!has_early_weights()) fetch_weights_of(kFirst, kStages);
    } else if (has_early_weights()) {
      wait_for_all_but<0>();
    }
    const int last_fetch = max(0, course.steps - kStages - 1);
    int phase = 0;
    Turn turn = {0, 0};
    for (int step = 0; step < course.steps; ++step) {
      wait_for_all_but<kStages - 1>();
      if (turn.step_of_phase == 0) {
        // Here the activations of this phase have arrived for all, and all have used those of the phase before, whose
        // slot is the next to be filled.
        __syncthreads();
        const int slot = turn.slot == 0 ? course.phase_slots - 1 : turn.slot - 1;
        if (phase + ahead_ < course.phases) activations_.fetch_phase(phase + ahead_, slot);
      }
      const float next_square = square_scale(step + 1);
      if (weights_.has(step)) add(step, turn, sums);
      square_ = next_square;
      weights_.fetch(step + kStages);
      if (step == last_fetch) ask_for_upcoming(arguments_.operands);
      if (++turn.step_of_phase == phase_steps) {
        turn = {turn.slot + 1 == course.phase_slots ? 0 : turn.slot + 1, 0};
        ++phase;
      }
    }
  }

 private:
  static constexpr bool kIsE4M3 = std::is_same_v<Wide, Float16>;
  static constexpr int kElementBytes = kIsE4M3 ? 1 : 2;  // of a
  static constexpr int kStages = stages_of(kRowGroups, kRowTiles);
  static constexpr int kFirst = kStages / 2;  // batches of weights before rows are prepared

  __device__ void fetch_weights_of(int first, int end) {
#pragma unroll 1
    for (int step = first; step < end; ++step) weights_.fetch(step);
  }

  // With more rows it is another kernel's work, and this one need not have the code.
  __device__ bool is_prepared() const { return kRowGroups == 1 && arguments_.course.prepares; }

  // Weights that were asked for before the activations were there.
  __device__ bool has_early_weights() const { return arguments_.follows; }

  __device__ float square_scale(int step) const {
    if constexpr (kScaling == Scaling::kOne) return 1.0f;
    if (!weights_.has(step)) return 1.0f;
    const int chunk = part_.first_chunk + step * arguments_.plan.depth_warps + part_.depth_warp;
    const int64_t row = (arguments_.course.all_chunks + 3) / 4 * 4;
    return __ldg(arguments_.operands.b_scale + part_.first_row / kMostBlockRows * row + chunk);
  }

  __device__ void add(int step, const Turn& turn, Sums<kRowGroups, kRowTiles>& sums) {
    if constexpr (kScaling == Scaling::kOne) {
      add_products(step, turn, sums);
    } else {
      Sums<kRowGroups, kRowTiles> of_chunk = {};
      add_products(step, turn, of_chunk);
      const float2* const lines = activations_.scales(turn);
#pragma unroll
      for (int group = 0; group < kRowGroups; ++group) {
        float2 scales = {square_, square_};
        if constexpr (kScaling == Scaling::kLines) {
          scales = {__fmul_rn(lines[4 * group].x, square_), __fmul_rn(lines[4 * group].y, square_)};
        }
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& sum = sums[tile][group][i];
            sum = __fmaf_rn(of_chunk[tile][group][i], i % 2 == 0 ? scales.x : scales.y, sum);
          }
        }
      }
    }
  }

  __device__ void add_products(int step, const Turn& turn, Sums<kRowGroups, kRowTiles>& sums) {
    const uint8_t* const elements = activations_.elements(turn);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t b[kRowTiles][4][4];  // of four products
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const uint4 upper = weights_.read(step, tile, 0, half), lower = weights_.read(step, tile, 1, half);
        const uint32_t words[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          widen(words[0][i], b[tile][i][0], b[tile][i][2], Wide{});
          widen(words[1][i], b[tile][i][1], b[tile][i][3], Wide{});
        }
      }
#pragma unroll
      for (int group = 0; group < kRowGroups; ++group) {
        // A row behind the last one is that again: its sums are not written.
        const int row = min(group * 8 + part_.lane / 4, arguments_.problem.m - 1);
        uint32_t a[4][2];
        read_activations(elements + row * arguments_.layout.phase_row + half * (kChunk / 2 * kElementBytes), a);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) multiply_add(sums[tile][group], b[tile][i], a[i], Wide{});
        }
      }
    }
  }

  __device__ static void read_activations(const uint8_t* elements, uint32_t (&a)[4][2]) {
    const uint4 first = read_four(elements);
    if constexpr (kIsE4M3) {
      const uint32_t words[4] = {first.x, first.y, first.z, first.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) widen(words[i], a[i][0], a[i][1], Wide{});
    } else {
      const uint4 second = read_four(elements + 16);
      a[0][0] = first.x, a[0][1] = first.y, a[1][0] = first.z, a[1][1] = first.w;
      a[2][0] = second.x, a[2][1] = second.y, a[3][0] = second.z, a[3][1] = second.w;
    }
  }

  const Arguments& arguments_;
  const Part& part_;
  const int ahead_;  // phases
  float square_;     // the scale of the chunk whose turn it is
  Weights<kRowGroups, kRowTiles> weights_;
  Activations<kElementBytes, kScaling, kRowGroups> activations_;
  Preparer<Wide> preparer_;
};

template <typename Wide, Scaling kScaling, int kRowGroups, int kRowTiles>
__global__ void __launch_bounds__(most_threads(kRowGroups), 1) kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ uint4 shared_vectors[];
  __shared__ Barrier received;
  auto* const shared = reinterpret_cast<uint8_t*>(shared_vectors);
  const Part part(arguments);
  Product<Wide, kScaling, kRowGroups, kRowTiles> product(arguments, part, shared);
  let_next_kernel_begin();
  product.start_early();
  wait_for_kernels_before();
  // Whatever else is read comes before the weights: behind them it arrives late, and a warp may wait for it anywhere.
  const Factors<kScaling> factors(arguments);
  Results<kRowGroups, kRowTiles> results(arguments, part, shared, received);
  product.start();
  Sums<kRowGroups, kRowTiles> sums = {};
  product.make(sums);
  results.write(sums, factors.product());
}

}  // namespace jax_fp8::few_rows_gemm
