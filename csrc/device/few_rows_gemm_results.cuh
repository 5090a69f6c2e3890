// The end of a GEMM of few rows: adds the sums of the warps and of the cluster's blocks, always in the same order, and
// writes the result.
#pragma once

#include <cstdint>
#include <type_traits>

#include "activation.cuh"
#include "async_copy.cuh"
#include "cluster.cuh"
#include "few_rows_gemm_pairs.cuh"
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

// What is added to two neighbours of d; to a gate and its linear part each a bias.
struct Addends {
  Pair bias[2], c;
};

// Sums of two neighbours of d; with gates those of the gate and of the linear part.
struct Totals {
  float2 sums[2];
};

// Of results that are rounded to `type` before.
__device__ inline float2 activated(const Problem& problem, float2 gate, float2 linear) {
  gate = floats_of(pair_of(gate, problem.d), problem.d), linear = floats_of(pair_of(linear, problem.d), problem.d);
  float2 result = {0, 0};
  const auto of_gate = [&](auto function) { result = {function.value(gate.x), function.value(gate.y)}; };
  if (problem.d == SourceType::kFloat32) {
    with_activation<float, false>(problem.activation, of_gate);
  } else {
    with_activation<BFloat16, false>(problem.activation, of_gate);
  }
  return problem.gated ? float2{result.x * linear.x, result.y * linear.y} : result;
}

// Two neighbours of d: where they lie among those of the block, and in d.
struct Target {
  int pair;
  int64_t place;
  bool exists;
};

// The results of a block: m rows of d and the columns of its rows of b, in pairs of neighbours.
template <Scaling kScaling, int kRowGroups, int kRowTiles, Way kWay>
class Results {
 public:
  // Every block of a cluster receives the sums of some of the pairs, which begins with its barrier.
  __device__ Results(const Arguments& arguments, const Part& part, uint8_t* shared, Barrier& received)
      : arguments_(arguments), part_(part), shared_(shared), received_(received),
        parts_(kActivates ? arguments.course.parts : 1),
        log2_width_(arguments.course.log2_pairs - (parts_ - 1)), pairs_(arguments.problem.m << log2_width_),
        block_pairs_(arguments.layout.received_part / (8 * parts_)),
        first_(target_of(static_cast<int>(threadIdx.x))) {
    if constexpr (kFetchesAddends) fetch_bias();
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (arguments.plan.cluster == 1) return;
    if (threadIdx.x == 0) {
      start(received_, 1);
      publish_barriers();
      arrive_and_expect(received_, arguments.plan.cluster * pairs_of(part.rank) * 8 * parts_);
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
    const int own_pairs = arguments_.plan.cluster == 1 ? pairs_ : pairs_of(part_.rank);
    wait_for_products(arguments_);  // all have used weights and activations, whose place the sums take
    put(sums);
    wait_for_products(arguments_);
    if (arguments_.plan.cluster > 1) exchange();
    Target target = first_;
    for (int i = static_cast<int>(threadIdx.x); i < own_pairs; target = target_of(i)) {
      finish(target, arguments_.plan.cluster == 1 ? sums_of_warps(target.pair) : sums_of_blocks(i), factor,
             factors.d_multiplier);
      i += arguments_.course.threads;
    }
  }

 private:
  // Bias and c are copied to shared memory before the weights, in the first batch.
  static constexpr bool kFetchesAddends = fetches_addends(kWay, kRowGroups);
  // Of other kernels, this would be code that nobody calls.
  static constexpr bool kActivates = kRowGroups == 1 || kWay == Way::kWarpgroups;

  __device__ int columns() const { return 2 << log2_width_; }  // of d, of this block
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
    const int log2_vectors = log2_width_ + 1 + log2_bytes - 4, vectors = 1 << log2_vectors;
    const auto* const source = static_cast<const uint8_t*>(from);
    const int first = first_column() << log2_bytes, row_bytes = arguments_.course.d_columns << log2_bytes;
    for (int i = static_cast<int>(threadIdx.x); i < rows << log2_vectors; i += arguments_.course.threads) {
      const int row = i >> log2_vectors, byte = first + (i & (vectors - 1)) * 16;
      if (byte >= row_bytes) continue;
      fetch(reinterpret_cast<uint4*>(to + i * 16),
            reinterpret_cast<const uint4*>(source + int64_t{row} * row_bytes + byte));
    }
  }

  // Of all pairs, a block owns as many as the others, in order; the last ones may own fewer.
  __device__ int pairs_of(int rank) const { return max(0, min(block_pairs_, pairs_ - rank * block_pairs_)); }

  __device__ int column_of(int pair) const { return pair & ((1 << log2_width_) - 1); }

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

  // Where the sums of a pair lie in a row of sums: with gates, the tiles of a warp are those of the gate and of the
  // linear part, or the halves of a block are.
  __device__ int place_in_sums(int column, int part) const {
    constexpr int kTilePairs = kWarpRows / 2;
    if (parts_ == 1) return column;
    if constexpr (kWay == Way::kWarpgroups) return (part << log2_width_) + column;
    return (column / kTilePairs * 2 + part) * kTilePairs + column % kTilePairs;
  }

  // The sums over the warps that share the rows of b.
  __device__ Totals sums_of_warps(int pair) const {
    Totals totals = {};
#pragma unroll 4
    for (int warp = 0; warp < arguments_.plan.depth_warps; ++warp) {
      const auto* const row = reinterpret_cast<const float2*>(row_of_sums(warp, pair >> log2_width_));
      totals.sums[0] = add(totals.sums[0], row[place_in_sums(column_of(pair), 0)]);
      if (parts_ == 2) totals.sums[1] = add(totals.sums[1], row[place_in_sums(column_of(pair), 1)]);
    }
    return totals;
  }

  // The sums of a block of the cluster, of the pairs of this one.
  __device__ float2* received_from(int rank, int part) const {
    auto* const first = reinterpret_cast<float2*>(shared_ + arguments_.layout.received);
    return first + (rank * parts_ + part) * block_pairs_;
  }

  // Sends sums to the blocks of the cluster, and waits for theirs.
  __device__ void exchange() const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    wait_for_cluster();  // all have begun their barriers
    for (int block = 0; block < arguments_.plan.cluster; ++block) {
      for (int i = static_cast<int>(threadIdx.x); i < pairs_of(block); i += arguments_.course.threads) {
        const Totals totals = sums_of_warps(block * block_pairs_ + i);
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

  __device__ int column_in_d(int pair) const { return part_.first_row / (2 * parts_) + column_of(pair); }

  __device__ bool is_behind_last_column(int pair) const {
    return 2 * column_in_d(pair) >= arguments_.course.d_columns;
  }

  __device__ int64_t place_in_d(int pair) const {
    const int column = column_in_d(pair);
    int start = 0, end = arguments_.course.d_columns / 2;  // of the part
#pragma unroll
    for (const int next : arguments_.problem.part_starts) {
      if (next == 0) continue;
      if (column >= next / 2) start = next / 2;
      if (column < next / 2) end = min(end, next / 2);
    }
    return int64_t{arguments_.problem.m} * start + int64_t{pair >> log2_width_} * (end - start) + column - start;
  }

  // The dtype of a bias that is added to results in that of d.
  __device__ SourceType bias_type() const {
    return arguments_.problem.d == SourceType::kFloat32 ? SourceType::kBFloat16 : arguments_.problem.d;
  }

  __device__ Addends read_addends(const Target& target) const {
    const int pair = target.pair;
    const Operands& operands = arguments_.operands;
    Addends read = {};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (operands.bias == nullptr || part >= parts_) continue;
      if constexpr (kFetchesAddends) {
        read.bias[part] = read_pair(addends(-1) + part * columns() * 2, column_of(pair), bias_type());
      } else {
        const int place = column_in_d(pair) + part * (arguments_.course.d_columns / 2);
        read.bias[part] = read_pair(operands.bias, place, bias_type());
      }
    }
    if (operands.c == nullptr) return read;
    if constexpr (kFetchesAddends) {
      read.c = read_pair(addends(pair >> log2_width_), column_of(pair), arguments_.problem.d);
    } else {
      read.c = read_pair(operands.c, target.place, arguments_.problem.d);
    }
    return read;
  }

  // Of the i-th pair that this block writes.
  __device__ Target target_of(int i) const {
    const int pair = part_.rank * block_pairs_ + i;
    return {pair, place_in_d(pair), !is_behind_last_column(pair)};
  }

  __device__ void finish(const Target& target, const Totals& totals, float factor, float d_multiplier) const {
    if (!target.exists) return;
    const Operands& operands = arguments_.operands;
    const SourceType type = arguments_.problem.d;
    const Addends addends = read_addends(target);
    float2 results[2];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const float2 sum = totals.sums[part];
      results[part] = {__fmul_rn(sum.x, factor), __fmul_rn(sum.y, factor)};
      if (operands.bias != nullptr) results[part] = add(results[part], floats_of(addends.bias[part], bias_type()));
    }
    float2 d = results[0];
    if (kActivates && arguments_.problem.activates) d = activated(arguments_.problem, d, results[1]);
    if (operands.c != nullptr) d = add(d, floats_of(addends.c, type));
    const Pair rounded = pair_of(d, type);
    if (kActivates && arguments_.problem.casts_d) {
      const float2 x = floats_of(rounded, type);
      static_cast<uint16_t*>(operands.d)[target.place] = static_cast<uint16_t>(
          cast_pair<Fp8Type::kE4M3>(__fmul_rn(x.x, d_multiplier), __fmul_rn(x.y, d_multiplier)));
    } else {
      write_pair(operands.d, target.place, rounded, type);
    }
  }

  const Arguments& arguments_;
  const Part& part_;
  uint8_t* const shared_;
  Barrier& received_;
  const int parts_;  // of a result: 2 with gates
  const int log2_width_, pairs_, block_pairs_;
  const Target first_;  // of this thread
};

}  // namespace jax_fp8::few_rows_gemm
