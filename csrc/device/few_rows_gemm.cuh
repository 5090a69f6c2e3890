// The products of a GEMM of few rows, d[m, n] = a[m, k] · b[n, k]ᵀ with at most 64 rows of a.
//
// b is the first operand of the tensor cores, 16 rows at a time, and 8 rows of a are the second. So a GEMM of one row
// wastes 7 of 8 multiplications, which cost nothing: memory is slower. Each weight is read once, from memory to shared
// memory and from there to the registers of one lane.
//
// Of 64 neighbours along k, lane 4 g + t copies 16, from 16 t on, of the rows g and g + 8 of b. They are its elements
// of four products: the order of k within a product is free, and the activations are read in the same order. So no
// lane needs what another one has copied, and the ring of weights needs no barrier. A chunk is two times 64 elements.
// Where the kernel prepares its rows, weights may come in boxes instead: few_rows_gemm_boxes.cuh. And on compute
// capability 9.0, rows of E4M3 have another kernel: few_rows_gemm_warpgroups.cuh.
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
#include "few_rows_gemm_boxes.cuh"
#include "few_rows_gemm_plan.cuh"
#include "few_rows_gemm_preparation.cuh"
#include "few_rows_gemm_results.cuh"
#include "few_rows_gemm_warpgroups.cuh"
#include "few_rows_gemm_weights.cuh"
#include "mma.cuh"
#include "programmatic.cuh"
#include "vector.cuh"

namespace jax_fp8::few_rows_gemm {

// Wide is the dtype in which the tensor cores multiply: that of a, or float16 where a is E4M3.
template <typename Wide, Scaling kScaling, int kRowGroups, int kRowTiles, bool kBoxed>
class Product {
 public:
  __device__ Product(const Arguments& arguments, const Part& part, uint8_t* shared, RingBarriers* rings)
      : arguments_(arguments), part_(part), ahead_(min(arguments.plan.ahead, arguments.course.phases)),
        weights_(weights_in(arguments, part, shared, rings)), activations_(arguments, part, shared),
        preparer_(arguments, part, shared) {}

  // While kernels before this one may still run.
  __device__ void start_early() {
    if (!kBoxed && has_early_weights()) fetch_weights_of(0, kStages);
    if (is_prepared()) preparer_.fetch_parameters();
  }

  // Has the first activations under way, and as many weights as fit. Activations come first: behind the weights they
  // would arrive after them, and no product could begin before. Nothing else may wait before this.
  __device__ void start() {
    square_ = square_scale(chunk_of(arguments_, part_, 0));
    if (is_prepared()) {
      preparer_.fetch_rows();
    } else {
      for (int phase = 0; phase < ahead_; ++phase) activations_.fetch_phase(phase, phase);
      if (has_early_weights()) end_batch();
    }
    if (!kBoxed && !has_early_weights()) fetch_weights_of(0, is_prepared() ? kFirst : kStages);
  }

  __device__ void make(Sums<kRowGroups, kRowTiles>& sums) {
    if (is_prepared()) {
      if (kBoxed || has_early_weights()) {
        wait_for_all_but<0>();
      } else {
        wait_for_all_but<kFirst>();
      }
      wait_for_products(arguments_);
      preparer_.make(kBoxed ? nullptr : activations_.slot(0), arguments_.layout.phase_row);
      if (!kBoxed && !has_early_weights()) fetch_weights_of(kFirst, kStages);
    } else if (!kBoxed && has_early_weights()) {
      wait_for_all_but<0>();
    }
    if constexpr (kBoxed) {
      wait_for_products(arguments_);
      add_boxes(sums);
    } else {
      add_batches(sums);
    }
  }

 private:
  using LaneWeights = Weights<kRowGroups, kRowTiles>;
  // Of the activations in shared memory. What is prepared beside boxes has been widened.
  static constexpr int kElementBytes = std::is_same_v<Wide, Float16> && !kBoxed ? 1 : 2;
  static constexpr int kStages = LaneWeights::kStages;
  static constexpr int kFirst = kStages / 2;  // batches of weights before rows are prepared

  __device__ static auto weights_in(const Arguments& arguments, const Part& part, uint8_t* shared,
                                    RingBarriers* rings) {
    if constexpr (kBoxed) {
      return BoxedWeights<kRowTiles>(arguments, part, shared + arguments.layout.ring, rings);
    } else {
      return LaneWeights(arguments, part, shared);
    }
  }

  // The sum over all steps, where each lane asks for the weights of a later one.
  __device__ void add_batches(Sums<kRowGroups, kRowTiles>& sums) {
    Turn turn = {};
    int slot = 0;
    for (int step = 0; step < arguments_.course.steps; ++step) {
      weights_.wait_for(slot);
      begin_phase(turn);
      const float next_square = square_scale(chunk_of(arguments_, part_, step + 1));
      if (chunk_of(arguments_, part_, step) < part_.chunks) add(0, turn, sums);
      square_ = next_square;
      weights_.fetch(step + kStages, slot);
      if (++slot == kStages) slot = 0;
      end_step(turn);
    }
  }

  // The sum over all steps, where another warp asks for the weights. All rows are prepared.
  __device__ void add_boxes(Sums<kRowGroups, kRowTiles>& sums) {
    int slot = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int step = 0; step < arguments_.course.steps; ++step) {
      const int chunk = chunk_of(arguments_, part_, step), step_chunks = arguments_.plan.step_chunks;
      if (chunk < part_.chunks) {
        weights_.wait_for(slot, parity);
#pragma unroll 1
        for (int i = 0; i < step_chunks && chunk + i < part_.chunks; ++i) {
          const bool is_last = i + 1 == step_chunks;
          const float next_square = square_scale(is_last ? chunk_of(arguments_, part_, step + 1) : chunk + i + 1);
          add(i, chunk, sums);
          square_ = next_square;
        }
        weights_.release(slot);
      }
      if (++slot == arguments_.course.stages) slot = 0, parity ^= 1;
    }
  }

  // Here the activations of this phase have arrived for all, and all have used those of the phase before, whose slot is
  // the next to be filled.
  __device__ void begin_phase(const Turn& turn) {
    if (turn.step_of_phase != 0) return;
    const Course& course = arguments_.course;
    wait_for_products(arguments_);
    const int next = turn.slot == 0 ? course.phase_slots - 1 : turn.slot - 1;
    if (turn.phase + ahead_ >= course.phases) return;
    activations_.fetch_phase(turn.phase + ahead_, next);
  }

  __device__ void end_step(Turn& turn) const {
    if (++turn.step_of_phase < arguments_.plan.phase_steps) return;
    turn = {turn.slot + 1 == arguments_.course.phase_slots ? 0 : turn.slot + 1, 0, turn.phase + 1};
  }

  __device__ void fetch_weights_of(int first, int end) {
    if constexpr (!kBoxed) {
#pragma unroll 1
      for (int step = first; step < end; ++step) weights_.fetch(step, step);
    }
  }

  // With more rows it is another kernel's work, and this one need not have the code.
  __device__ bool is_prepared() const { return kRowGroups == 1 && arguments_.course.prepares; }

  // Weights that were asked for before the activations were there.
  __device__ bool has_early_weights() const { return arguments_.follows; }

  // The scale of a chunk of this block.
  __device__ float square_scale(int chunk) const {
    if constexpr (kScaling == Scaling::kOne) return 1.0f;
    return chunk < part_.chunks ? few_rows_gemm::square_scale(arguments_, part_, chunk) : 1.0f;
  }

  // The products of one chunk of a step. `where` its activations are: a turn, or the step's first chunk.
  template <typename Where>
  __device__ void add(int chunk, const Where& where, Sums<kRowGroups, kRowTiles>& sums) {
    if constexpr (kScaling == Scaling::kOne) {
      add_products(chunk, elements(where, chunk), sums);
    } else {
      Sums<kRowGroups, kRowTiles> of_chunk = {};
      add_products(chunk, elements(where, chunk), of_chunk);
      const float2* const lines = scales(where);
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

  __device__ const uint8_t* elements(const Turn& turn, int) const { return activations_.elements(turn); }
  __device__ const uint8_t* elements(int first, int chunk) const { return preparer_.elements(first + chunk); }

  __device__ const float2* scales(const Turn& turn) const { return activations_.scales(turn); }
  __device__ const float2* scales(int) const { return nullptr; }

  __device__ void add_products(int chunk, const uint8_t* elements, Sums<kRowGroups, kRowTiles>& sums) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t b[kRowTiles][4][4];  // of four products
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const uint4 upper = weights_.read(chunk, tile, 0, half), lower = weights_.read(chunk, tile, 1, half);
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
    if constexpr (kElementBytes == 1) {
      const uint32_t words[4] = {first.x, first.y, first.z, first.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) widen(words[i], a[i][0], a[i][1], Wide{});
    } else {
      const uint4 second = read_four(elements + (kBoxed ? kWidePiece : 16));
      a[0][0] = first.x, a[0][1] = first.y, a[1][0] = first.z, a[1][1] = first.w;
      a[2][0] = second.x, a[2][1] = second.y, a[3][0] = second.z, a[3][1] = second.w;
    }
  }

  const Arguments& arguments_;
  const Part& part_;
  const int ahead_;  // phases
  float square_;     // the scale of the chunk whose turn it is
  std::conditional_t<kBoxed, BoxedWeights<kRowTiles>, LaneWeights> weights_;
  Activations<kElementBytes, kScaling, kRowGroups> activations_;
  Preparer<Wide> preparer_;
};

// What multiplies, the way that the plan says.
template <typename Wide, Scaling kScaling, int kRowGroups, int kRowTiles, Way kWay>
using ProductOf = std::conditional_t<kWay == Way::kWarpgroups, WarpgroupProduct<kScaling, kRowGroups>,
                                     Product<Wide, kScaling, kRowGroups, kRowTiles, kWay == Way::kBoxes>>;

template <Way kWay>
__device__ inline void fetch(const Arguments& arguments, const Part& part, uint8_t* ring, RingBarriers* rings) {
  if constexpr (kWay == Way::kWarpgroups) {
    BoxesOfBoth(arguments, part, ring, rings).fetch();
  } else {
    fetch_boxes(arguments, part, ring, rings);
  }
}

// What a block does; `shared` is its dynamic shared memory.
template <typename Wide, Scaling kScaling, int kRowGroups, int kRowTiles, Way kWay>
__device__ inline void multiply_rows(const Arguments& arguments, uint8_t* shared) {
  constexpr bool kBoxed = kWay != Way::kLanes;
  constexpr int kRings = kBoxed ? kMostWarps : 1;
  __shared__ Barrier received;
  __shared__ RingBarriers rings[kRings];
  if constexpr (kBoxed) shared += -shared_address(shared) & (kBoxAlignment - 1);
  const Part part(arguments);
  let_next_kernel_begin();
  if constexpr (kBoxed) {
    start_rings(arguments, rings);
    __syncthreads();
    if (part.warp == arguments.course.warps) {
      if (part.lane == 0) fetch<kWay>(arguments, part, shared + arguments.layout.ring, rings);
      return wait_for_kernels_before();
    }
  }
  ProductOf<Wide, kScaling, kRowGroups, kRowTiles, kWay> product(arguments, part, shared, rings);
  product.start_early();
  Results<kScaling, kRowGroups, kRowTiles, kWay> results(arguments, part, shared, received);
  // Whatever else is read comes before the weights: behind them it arrives late, and a warp may wait for it anywhere.
  Factors<kScaling> factors(arguments);
  wait_for_kernels_before();
  factors.load_late(arguments);
  results.fetch_c();
  product.start();
  Sums<kRowGroups, kRowTiles> sums = {};
  product.make(sums);
  results.write(sums, factors);
}

template <Way kWay>
constexpr bool kIsCompiled = kWay == Way::kLanes || (kWay == Way::kBoxes ? kHasBoxes : kHasWarpgroups);

// By which the registers of a thread are bounded. With few rows of a, warpgroups have 48: so the attention that follows
// finds room beside them on each quarter of a multiprocessor.
template <Scaling kScaling, int kRowGroups, Way kWay>
struct Bounds {
  static constexpr bool kIsSmall = kWay == Way::kWarpgroups && kRowGroups <= 2;
  static constexpr int kThreads = most_threads(kRowGroups, kWay, kScaling) + (kWay == Way::kLanes ? 0 : 32);
  static constexpr int kMostThreads = kIsSmall ? 640 : kThreads, kBlocks = kIsSmall ? 2 : 1;
};

template <typename Wide, Scaling kScaling, int kRowGroups, int kRowTiles, Way kWay>
__global__ void __launch_bounds__(Bounds<kScaling, kRowGroups, kWay>::kMostThreads,
                                  Bounds<kScaling, kRowGroups, kWay>::kBlocks)
    kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ uint4 shared[];
  if constexpr (kIsCompiled<kWay>) {
    multiply_rows<Wide, kScaling, kRowGroups, kRowTiles, kWay>(arguments, reinterpret_cast<uint8_t*>(shared));
  } else {
    __trap();  // the host never launches it
  }
}

}  // namespace jax_fp8::few_rows_gemm
