// The end of a GEMM of few rows: adds the sums of the warps and of the cluster's blocks, always in the same order, and
// writes the result.
#pragma once

#include <cstdint>
#include <type_traits>

#include "activation.cuh"
#include "async_copy.cuh"
#include "cluster.cuh"
#include "few_rows_gemm_fours.cuh"
#include "few_rows_gemm_plan.cuh"
#include "few_rows_gemm_weights.cuh"
#include "fp8.cuh"
#include "prefetch.cuh"
#include "vector.cuh"

namespace jax_fp8::few_rows_gemm {

template <int kRowGroups, int kRowTiles>
using Sums = float[kRowTiles][kRowGroups][4];

// By what the sums are multiplied at the end. The scales of tiles have been multiplied with the sums already.
template <Scaling kScaling>
struct Factors {
  float alpha, a_scale = 1.0f, b_scale = 1.0f, d_multiplier = 1.0f;

  // While kernels before this one may still run. One of them may make the scale of a, which comes to L2 meanwhile.
  __device__ explicit Factors(const Arguments& arguments) : alpha(arguments.problem.alpha) {
    if (threadIdx.x == 0) ask_for_line(arguments.operands.a_scale);
    if (threadIdx.x == 0 && arguments.problem.casts_d) ask_for_line(arguments.operands.d_scale);
    if constexpr (kScaling == Scaling::kOne) b_scale = load_now(arguments.operands.b_scale);
  }

  __device__ void load_late(const Arguments& arguments) {
    if constexpr (kScaling != Scaling::kLines) a_scale = load_now(arguments.operands.a_scale);
    if (arguments.problem.casts_d) d_multiplier = multiplier_of(load_now(arguments.operands.d_scale));
  }

  __device__ float product() const { return alpha * (a_scale * b_scale); }
};

// Sums of four neighbours of d; with gates those of the gate and of the linear part.
struct Totals {
  float4 sums[2];
};

// Of results that are rounded to `type` before.
__device__ inline float4 activated(const Problem& problem, float4 gate, float4 linear) {
  gate = floats_of(four_of(gate, problem.d), problem.d), linear = floats_of(four_of(linear, problem.d), problem.d);
  float4 d = {0, 0, 0, 0};
  const auto of_gate = [&](auto function) {
    d = {function.value(gate.x), function.value(gate.y), function.value(gate.z), function.value(gate.w)};
  };
  if (problem.d == SourceType::kFloat32) {
    with_activation<float, false>(problem.activation, of_gate);
  } else {
    with_activation<BFloat16, false>(problem.activation, of_gate);
  }
  return problem.gated ? float4{d.x * linear.x, d.y * linear.y, d.z * linear.z, d.w * linear.w} : d;
}

// The results of a block: m rows of d and the columns of its rows of b, in fours of neighbours. The threads are a
// multiple of the fours of a row, so each has the same columns of all its rows.
template <Scaling kScaling, int kRowGroups, int kRowTiles, Way kWay>
class Results {
 public:
  // Every block of a cluster receives the sums of some of the fours, which begins with its barrier.
  __device__ Results(const Arguments& arguments, const Part& part, uint8_t* shared, Barrier& received)
      : arguments_(arguments), part_(part), shared_(shared), received_(received),
        parts_(kActivates ? arguments.course.parts : 1),
        log2_width_(arguments.course.log2_fours - (parts_ - 1)), fours_(arguments.problem.m << log2_width_),
        block_fours_(arguments.layout.received_part / (16 * parts_)),
        column_(column_of(part.rank * block_fours_ + static_cast<int>(threadIdx.x))) {
    if constexpr (kFetchesAddends) fetch_bias();
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (arguments.plan.cluster == 1) return;
    if (threadIdx.x == 0) {
      start(received_, 1);
      publish_barriers();
      arrive_and_expect(received_, arguments.plan.cluster * fours_of(part.rank) * 16 * parts_);
    }
    arrive_at_cluster_with_nothing();
#endif
  }

  // Where kernels before have written it.
  __device__ void fetch_c() const {
    if constexpr (kFetchesAddends) {
      if (arguments_.operands.c == nullptr) return;
      fetch_rows(addends(0), arguments_.operands.c, arguments_.problem.m, element_bytes() / 2);
    }
  }

  __device__ void write(const Sums<kRowGroups, kRowTiles>& sums, const Factors<kScaling>& factors) {
    const float factor = factors.product();
    const bool is_alone = arguments_.plan.cluster == 1;
    wait_for_products(arguments_);  // all have used weights and activations, whose place the sums take
    put(sums);
    wait_for_products(arguments_);
    if (!is_alone) exchange();
    if (column_in_d(column_.in_block) >= columns_of_d()) return;
    const int own_fours = fours_of(part_.rank), first = part_.rank * block_fours_;
    const Totals bias = read_bias();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < own_fours; i += arguments_.course.threads) {
      finish(first + i, is_alone ? sums_of_warps(i) : sums_of_blocks(i), factor, bias, factors.d_multiplier);
    }
  }

 private:
  // Bias and c are copied to shared memory before the weights, in the first batch.
  static constexpr bool kFetchesAddends = fetches_addends(kWay, kRowGroups);
  // Of other kernels, this would be code that nobody calls.
  static constexpr bool kActivates = kRowGroups == 1 || kWay == Way::kWarpgroups;

  __device__ int columns() const { return 4 << log2_width_; }  // of d, of this block
  __device__ int first_column() const { return part_.first_row / parts_; }
  __device__ int element_bytes() const { return arguments_.problem.d == SourceType::kFloat32 ? 4 : 2; }

  // Bias, and behind it c.
  __device__ uint8_t* addends(int row) const {
    constexpr int kBiasBytes = 2 * kMostBlockRows;
    return shared_ + arguments_.layout.addends + (row < 0 ? 0 : kBiasBytes + row * columns() * element_bytes());
  }

  __device__ void fetch_bias() const {
    if (arguments_.operands.bias != nullptr) fetch_rows(addends(-1), arguments_.operands.bias, parts_, 1);
  }

  // This block's columns of some rows, each of a power of two of vectors.
  __device__ void fetch_rows(uint8_t* to, const void* from, int rows, int log2_bytes) const {
    const int log2_vectors = log2_width_ + 2 + log2_bytes - 4, vectors = 1 << log2_vectors;
    const auto* const source = static_cast<const uint8_t*>(from);
    const int first = first_column() << log2_bytes, row_bytes = arguments_.course.d_columns << log2_bytes;
    for (int i = static_cast<int>(threadIdx.x); i < rows << log2_vectors; i += arguments_.course.threads) {
      const int row = i >> log2_vectors, byte = first + (i & (vectors - 1)) * 16;
      if (byte >= row_bytes) continue;
      fetch(reinterpret_cast<uint4*>(to + i * 16),
            reinterpret_cast<const uint4*>(source + int64_t{row} * row_bytes + byte));
    }
  }

  // Of all fours, a block owns as many as the others, in order; the last ones may own fewer.
  __device__ int fours_of(int rank) const { return max(0, min(block_fours_, fours_ - rank * block_fours_)); }

  __device__ float* row_of_sums(int depth_warp, int row) const {
    const int before = depth_warp * kRowGroups * 8 + row;
    return reinterpret_cast<float*>(shared_ + before * arguments_.layout.sums_row);
  }

  __device__ void put(const Sums<kRowGroups, kRowTiles>& sums) const {
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const int row = group * 8 + part_.lane % 4 * 2;
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const int column = (part_.row_warp * kRowTiles + tile) * kWarpRows + part_.lane / 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          row_of_sums(part_.depth_warp, row + i % 2)[column + i / 2 * 8] = sums[tile][group][i];
        }
      }
    }
  }

  // Where the sums of a four lie in a row of sums: with gates, the tiles of a warp are those of the gate and of the
  // linear part, or the halves of a block are.
  __device__ int place_in_sums(int column, int part) const {
    constexpr int kTileFours = kWarpRows / 4;
    if (parts_ == 1) return column;
    if constexpr (kWay == Way::kWarpgroups) return (part << log2_width_) + column;
    return (column / kTileFours * 2 + part) * kTileFours + column % kTileFours;
  }

  // The sums over the warps that share the rows of b.
  __device__ Totals sums_of_warps(int four) const {
    const int column = four & ((1 << log2_width_) - 1), row = four >> log2_width_;
    Totals totals = {};
#pragma unroll 4
    for (int warp = 0; warp < arguments_.plan.depth_warps; ++warp) {
      const auto* const sums = reinterpret_cast<const float4*>(row_of_sums(warp, row));
      totals.sums[0] = add(totals.sums[0], sums[place_in_sums(column, 0)]);
      if (parts_ == 2) totals.sums[1] = add(totals.sums[1], sums[place_in_sums(column, 1)]);
    }
    return totals;
  }

  // The sums of a block of the cluster, of the fours of this one.
  __device__ float4* received_from(int rank, int part) const {
    auto* const first = reinterpret_cast<float4*>(shared_ + arguments_.layout.received);
    return first + (rank * parts_ + part) * block_fours_;
  }

  // Sends sums to the blocks of the cluster, and waits for theirs.
  __device__ void exchange() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    wait_for_cluster();  // all have begun their barriers
    for (int block = 0; block < arguments_.plan.cluster; ++block) {
      for (int i = static_cast<int>(threadIdx.x); i < fours_of(block); i += arguments_.course.threads) {
        const Totals totals = sums_of_warps(block * block_fours_ + i);
        send(totals.sums[0], received_from(part_.rank, 0) + i, received_, block);
        if (parts_ == 2) send(totals.sums[1], received_from(part_.rank, 1) + i, received_, block);
      }
    }
    wait(received_, 0);
#endif
  }

  __device__ Totals sums_of_blocks(int i) const {
    Totals totals = {};
#pragma unroll 2
    for (int block = 0; block < arguments_.plan.cluster; ++block) {
      totals.sums[0] = add(totals.sums[0], received_from(block, 0)[i]);
      if (parts_ == 2) totals.sums[1] = add(totals.sums[1], received_from(block, 1)[i]);
    }
    return totals;
  }

  // Four neighbouring columns: where they lie among those of the block, and in d those of its first row.
  struct Column {
    int in_block, place;
    int row_fours;  // from one row to the next
  };

  __device__ int columns_of_d() const { return arguments_.course.d_columns / 4; }
  __device__ int column_in_d(int in_block) const { return part_.first_row / (4 * parts_) + in_block; }

  __device__ Column column_of(int four) const {
    const int in_block = four & ((1 << log2_width_) - 1), in_d = column_in_d(in_block);
    int start = 0, end = columns_of_d();  // of the part
#pragma unroll
    for (const int next : arguments_.problem.part_starts) {
      if (next == 0) continue;
      if (in_d >= next / 4) start = next / 4;
      if (in_d < next / 4) end = min(end, next / 4);
    }
    return {in_block, arguments_.problem.m * start + in_d - start, end - start};
  }

  // The dtype of a bias that is added to results in that of d.
  __device__ SourceType bias_type() const {
    return arguments_.problem.d == SourceType::kFloat32 ? SourceType::kBFloat16 : arguments_.problem.d;
  }

  __device__ Totals read_bias() const {
    const void* const bias = arguments_.operands.bias;
    Totals read = {};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (bias == nullptr || part >= parts_) continue;
      const Four four = kFetchesAddends
          ? load_four(addends(-1) + part * columns() * 2, column_.in_block, bias_type())
          : load_four(bias, column_in_d(column_.in_block) + part * columns_of_d(), bias_type());
      read.sums[part] = floats_of(four, bias_type());
    }
    return read;
  }

  __device__ float4 read_c(int row, int64_t place) const {
    const SourceType type = arguments_.problem.d;
    if constexpr (kFetchesAddends) return floats_of(load_four(addends(row), column_.in_block, type), type);
    return floats_of(load_four(arguments_.operands.c, place, type), type);
  }

  __device__ void finish(int four, const Totals& totals, float factor, const Totals& bias, float d_multiplier) const {
    const Operands& operands = arguments_.operands;
    const SourceType type = arguments_.problem.d;
    const int row = four >> log2_width_;
    const int64_t place = column_.place + row * column_.row_fours;
    float4 results[2];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      results[part] = multiply(totals.sums[part], factor);
      if (operands.bias != nullptr) results[part] = add(results[part], bias.sums[part]);
    }
    float4 d = results[0];
    if (kActivates && arguments_.problem.activates) d = activated(arguments_.problem, d, results[1]);
    if (operands.c != nullptr) d = add(d, read_c(row, place));
    const Four rounded = four_of(d, type);
    if (kActivates && arguments_.problem.casts_d) {
      const float4 x = floats_of(rounded, type);
      const float four_floats[4] = {x.x, x.y, x.z, x.w};
      static_cast<uint32_t*>(operands.d)[place] = quantize_four<Fp8Type::kE4M3>(four_floats, d_multiplier);
    } else {
      store_four(operands.d, place, rounded, type);
    }
  }

  const Arguments& arguments_;
  const Part& part_;
  uint8_t* const shared_;
  Barrier& received_;
  const int parts_;  // of a result: 2 with gates
  const int log2_width_, fours_, block_fours_;
  const Column column_;  // of this thread
};

}  // namespace jax_fp8::few_rows_gemm
