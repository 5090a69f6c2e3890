// d = alpha a bᵀ + bias + c of FP8 matrices by the tensor cores of compute capability 9.0, scaled by one number each, or
// a by lines of 128 elements along k and b by squares of 128 x 128.
//
//     a, b ─copies→ stages in shared memory ─tensor cores→ sums of 128 products ─times their scales→ sums, float32
//          ─alpha, bias, c→ d
//
// A block makes tiles of 128 x 256, one after the other, as grouped_gemm_tiles.cuh says. Of its three warpgroups one has a thread
// that asks for copies, as long as a stage is free; the two others multiply 64 rows each. The tensor cores add FP8
// products with fewer bits than float32 has, so by tile the sum of each 128 is scaled and added up in float32. While one
// warpgroup does that, the tensor cores work for the other: they take turns. Of what both blocks of a cluster read, each
// asks for one half, which is copied to both.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../grouped_gemm.h"
#include "async_copy.cuh"
#include "cluster.cuh"
#include "grouped_gemm_tiles.cuh"
#include "vector.cuh"
#include "warpgroup.cuh"

namespace jax_fp8::grouped_gemm {

constexpr int kWarpgroups = 2, kThreads = 128 * (1 + kWarpgroups);  // those that multiply, and one that copies
constexpr int kStages = 3;
constexpr int kHalves = kTileColumns / kColumnsOfProduct;
constexpr int kRegistersToCopy = 40, kRegistersToMultiply = 232;
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

// The stage after this one, and the parity of its phase.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// ---- the warpgroup that copies ---------------------------------------------------------------------------------------

// Each block asks for half of the rows of b that both need, and for all of them where it needs others.
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

// ---- the warpgroups that multiply ------------------------------------------------------------------------------------

// The scales of one step along k after the other: of this thread's two rows of a, and of the halves of b.
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
    const StepScales scales = {{__ldg(rows_), __ldg(rows_ + second_row_)}, {__ldg(halves_), __ldg(halves_ + second_half_)}};
    rows_ += next_row_;
    ++halves_;
    return scales;
  }

 private:
  const float *rows_, *halves_;
  int second_row_, second_half_, next_row_;
};

// 64 x 128 products of one step along k; they are not there before `wait_for_products`.
template <Fp8Type kA, Fp8Type kB>
__device__ inline void multiply_step(Products& products, uint64_t a, uint64_t b, bool adds) {
  constexpr int kSteps = kTileDepth / kDepthOfProduct, kUnits = kDepthOfProduct / 16;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    multiply<kA, kB>(products, a + i * kUnits, b + i * kUnits, adds || i > 0);
  }
}

// How the tensor cores find a stage: of a the rows of one warpgroup, and of b one half.
struct StageOperands {
  uint64_t a, b;

  __device__ StageOperands(const Shared& shared, int warpgroup)
      : a(rows_in_shared(shared.stages[0].a[warpgroup])), b(rows_in_shared(shared.stages[0].b[0])) {}

  __device__ uint64_t a_of(int stage) const { return a + stage * (sizeof(Stage) / 16); }
  __device__ uint64_t b_of(int stage, int half) const {
    return b + stage * (sizeof(Stage) / 16) + half * (kColumnsOfProduct * kTileDepth / 16);
  }
};

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

// The sum of each 128 products times their scales. What need not wait for the tensor cores is done while they work.
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

// ---- what becomes of the sums ----------------------------------------------------------------------------------------

// A barrier of the threads of one warpgroup. Number 0 is of the whole block.
__device__ inline void meet_in(int warpgroup) { 
  asm volatile("bar.sync %0, %1;" ::"r"(warpgroup + 1), "n"(128) : "memory");
}

// A float32 product takes a bias in bfloat16; otherwise it has the type of the result.
template <typename D>
using BiasType = std::conditional_t<std::is_same_v<D, float>, BFloat16, D>;

template <typename T>
__device__ inline float2 unpack_two(uint32_t bits) {
  float pair[2];
  unpack(bits, pair, T{});
  return {pair[0], pair[1]};
}

// Of a result's columns, how many make a box, and how many boxes hold those that are written together.
template <typename D>
constexpr int kBoxColumns = kSwizzleBytes / sizeof(D);
template <typename D>
constexpr int kColumnsTogether = kBoxColumns<D> * kBoxes;

// Of the 8 x 8 elements beside each other that a warp has, how many it writes at once.
template <typename D>
constexpr int kMatrices = sizeof(D) == 2 ? 2 : 1;

// What a warpgroup writes: boxes in shared memory, where c arrives before, and from where they are copied.
template <typename D>
class Results {
 public:
  __device__ Results(const Arguments& arguments, Shared& shared, int warpgroup)
      : arguments_(arguments), boxes_(shared.results[warpgroup]), bias_(shared.bias[warpgroup]),
        c_arrived_(shared.c_arrived[warpgroup]), warpgroup_(warpgroup), is_first_(threadIdx.x % 128 == 0) {}

  // Before the sums of a tile are there: what will be added to them.
  __device__ void begin(const GemmTile& tile) {
    const int column = tile.column + threadIdx.x % 128 * 2;
    if (arguments_.bias != nullptr && column < arguments_.shape.n) {
      bias_[threadIdx.x % 128] = __ldg(static_cast<const uint32_t*>(arguments_.bias) + column / 2);
    }
    load_c(tile, 0);
  }

  __device__ void write(const GemmTile& tile, float factor, const Products (&sums)[kHalves]) {
#pragma unroll
    for (int first = 0; first < kTileColumns; first += kColumnsTogether<D>) {
      if (first > 0) load_c(tile, first);
      if (is_first_ && !arguments_.has_c) wait_for_stores_to_read();
      meet_in(warpgroup_);
      if (arguments_.has_c) {
        wait(c_arrived_, c_parity_);
        c_parity_ ^= 1;
      }
      if (arguments_.bias != nullptr) {
        arguments_.has_c ? fill<true, true>(first, factor, sums) : fill<true, false>(first, factor, sums);
      } else {
        arguments_.has_c ? fill<false, true>(first, factor, sums) : fill<false, false>(first, factor, sums);
      }
      publish_to_copies();
      meet_in(warpgroup_);
      if (is_first_) {
        for (int box = 0; box < kBoxes; ++box) store_box(arguments_.d, corner(tile, first, box), boxes_[box]);
        commit_stores();
      }
    }
  }

  __device__ void end() {
    if (is_first_) wait_for_stores();
  }

 private:
  __device__ Corner corner(const GemmTile& tile, int first, int box) const {
    const int row = tile.row + warpgroup_ * kRowsOfWarpgroup;
    return {tile.column + first + box * kBoxColumns<D>, row, tile.d_matrix};
  }

  __device__ void load_c(const GemmTile& tile, int first) {
    if (!arguments_.has_c || !is_first_) return;
    wait_for_stores_to_read();
    arrive_and_expect(c_arrived_, kBoxes * kBoxBytes);
    for (int box = 0; box < kBoxes; ++box) load_box(arguments_.c, corner(tile, first, box), boxes_[box], c_arrived_);
  }

  template <bool kHasBias, bool kHasC>
  __device__ static float2 finished(const float* sum, float factor, float2 bias, float2 c) {
    float2 d = {sum[0] * factor, sum[1] * factor};
    if constexpr (kHasBias) d = {fmaf(sum[0], factor, bias.x), fmaf(sum[1], factor, bias.y)};
    if constexpr (kHasC) d = {d.x + c.x, d.y + c.y};
    return d;
  }

  // The columns from `first` on that are written together. A row's pieces of 16 bytes are swizzled, so a column further
  // to the right is an exclusive or of the address, which begins at a multiple of 128 bytes.
  template <bool kHasBias, bool kHasC>
  __device__ void fill(int first, float factor, const Products (&sums)[kHalves]) {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 % 4 * 16;
    // 16 bit: of four matrices of 8 x 8, two above two, a lane has the address of one row of one of them.
    const int row = first_row + (sizeof(D) == 2 ? lane % 16 : lane / 4);
    const int byte = sizeof(D) == 2 ? lane / 16 * 16 : lane % 4 * 8;
    const uint32_t start = shared_address(boxes_) + row * kSwizzleBytes + (byte ^ row % 8 * 16);
#pragma unroll
    for (int column = 0; column < kColumnsTogether<D>; column += 8 * kMatrices<D>) {
      const int in_tile = first + column;
      const uint32_t box = start + column / kBoxColumns<D> * kBoxBytes;
      const uint32_t at = box ^ column % kBoxColumns<D> * static_cast<int>(sizeof(D));
      const float* const sum = sums[in_tile / kColumnsOfProduct].of + in_tile % kColumnsOfProduct / 2;
      float2 bias[kMatrices<D>] = {};
#pragma unroll
      for (int i = 0; kHasBias && i < kMatrices<D>; ++i) {
        bias[i] = unpack_two<BiasType<D>>(bias_[in_tile / 2 + 4 * i + lane % 4]);
      }
      if constexpr (sizeof(D) == 2) {
        uint32_t c[4] = {}, d[4];
        if constexpr (kHasC) {
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                       : "r"(at)
                       : "memory");
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // above, below, and the same to the right
          const float2 pair = finished<kHasBias, kHasC>(sum + 2 * i, factor, bias[i / 2], unpack_two<D>(c[i]));
          d[i] = pack(pair.x, pair.y, D{});
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(d[0]),
                     "r"(d[1]), "r"(d[2]), "r"(d[3])
                     : "memory");
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // above, below
          auto* const pair = reinterpret_cast<float2*>(__cvta_shared_to_generic(at + i * 8 * kSwizzleBytes));
          *pair = finished<kHasBias, kHasC>(sum + 2 * i, factor, bias[0], kHasC ? *pair : float2{});
        }
      }
    }
  }

  const Arguments& arguments_;
  uint8_t (*const boxes_)[kBoxBytes];
  uint32_t* const bias_;
  Barrier& c_arrived_;
  const int warpgroup_;
  const bool is_first_;
  uint32_t c_parity_ = 0;
};

// What a warp has in common, so that the compiler knows it too: loops over it need no care for threads that part.
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
      start(shared.emptied[stage], 2 * 4 * kWarpgroups);  // by each warp of both blocks
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
  arrive_at_cluster();  // until then the other block may still copy to this one, or arrive here
  wait_for_cluster();
#else
  __trap();
#endif
}

}  // namespace jax_fp8::grouped_gemm
