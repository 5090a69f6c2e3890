// The end of a GEMM of few rows: adds the sums of the warps and of the cluster's blocks, always in the same order, and
// writes the result.
#pragma once

#include <cstdint>
#include <type_traits>

#include "async_copy.cuh"
#include "cluster.cuh"
#include "few_rows_gemm_plan.cuh"
#include "few_rows_gemm_weights.cuh"
#include "vector.cuh"

namespace jax_fp8::few_rows_gemm {

template <int kRowGroups, int kRowTiles>
using Sums = float[kRowTiles][kRowGroups][4];

// By what the sums are multiplied at the end. The scales of tiles have been multiplied with the sums already.
template <Scaling kScaling>
__device__ inline float factor_of(const Arguments& arguments) {
  const Operands& operands = arguments.operands;
  float factor = arguments.problem.alpha;
  if constexpr (kScaling == Scaling::kOne) factor *= __ldg(operands.a_scale) * __ldg(operands.b_scale);
  if constexpr (kScaling == Scaling::kSquares) factor *= __ldg(operands.a_scale);
  return factor;
}

// Two neighbours of a row of D.
template <typename D>
__device__ inline float2 read_pair(const void* source, int64_t pair) {
  if constexpr (std::is_same_v<D, float>) {
    return static_cast<const float2*>(source)[pair];
  } else {
    float two[2];
    unpack(static_cast<const uint32_t*>(source)[pair], two, D{});
    return {two[0], two[1]};
  }
}

template <typename D>
__device__ inline void write_pair(void* target, int64_t pair, float2 value) {
  if constexpr (std::is_same_v<D, float>) {
    static_cast<float2*>(target)[pair] = value;
  } else {
    static_cast<uint32_t*>(target)[pair] = pack(value.x, value.y, D{});
  }
}

// The results of a block: m rows of d and the columns of its rows of b, in pairs of neighbours.
template <int kRowGroups, int kRowTiles>
class Results {
 public:
  // Every block of a cluster receives the sums of some of the pairs, which begins with its barrier.
  __device__ Results(const Arguments& arguments, const Part& part, uint8_t* shared, Barrier& received)
      : arguments_(arguments), part_(part), shared_(shared), received_(received),
        log2_width_(arguments.course.log2_pairs), pairs_(arguments.problem.m << log2_width_),
        block_pairs_(arguments.layout.received_part / 8) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (arguments.plan.cluster == 1) return;
    if (threadIdx.x == 0) {
      start(received_, 1);
      publish_barriers();
      arrive_and_expect(received_, arguments.plan.cluster * pairs_of(part.rank) * 8);
    }
    arrive_at_cluster_with_nothing();
#endif
  }

  __device__ void write(const Sums<kRowGroups, kRowTiles>& sums, float factor) {
    __syncthreads();  // all have used weights and activations, whose place the sums take
    put(sums);
    __syncthreads();
    switch (arguments_.problem.d) {
      case SourceType::kFloat32: return write_as<float>(factor);
      case SourceType::kBFloat16: return write_as<BFloat16>(factor);
      case SourceType::kFloat16: return write_as<Float16>(factor);
    }
  }

 private:
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

  // The sum over the warps that share the rows of b.
  __device__ float2 sum_of_warps(int pair) const {
    float2 total = {0, 0};
    for (int warp = 0; warp < arguments_.plan.depth_warps; ++warp) {
      const float2 one = reinterpret_cast<const float2*>(row_of_sums(warp, pair >> log2_width_))[column_of(pair)];
      total = {total.x + one.x, total.y + one.y};
    }
    return total;
  }

  template <typename D>
  __device__ void write_as(float factor) const {
    const int threads = static_cast<int>(blockDim.x), first = static_cast<int>(threadIdx.x);
    if (arguments_.plan.cluster == 1) {
      for (int pair = first; pair < pairs_; pair += threads) finish<D>(pair, sum_of_warps(pair), factor);
      return;
    }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    auto* const parts = reinterpret_cast<float2*>(shared_ + arguments_.layout.received);
    wait_for_cluster();  // all have begun their barriers
    for (int block = 0; block < arguments_.plan.cluster; ++block) {
      for (int i = first; i < pairs_of(block); i += threads) {
        send(sum_of_warps(block * block_pairs_ + i), parts + part_.rank * block_pairs_ + i, received_, block);
      }
    }
    wait(received_, 0);
    for (int i = first; i < pairs_of(part_.rank); i += threads) {
      float2 total = {0, 0};
      for (int block = 0; block < arguments_.plan.cluster; ++block) {
        const float2 one = parts[block * block_pairs_ + i];
        total = {total.x + one.x, total.y + one.y};
      }
      finish<D>(part_.rank * block_pairs_ + i, total, factor);
    }
#endif
  }

  template <typename D>
  __device__ void finish(int pair, float2 sum, float factor) const {
    using BiasType = std::conditional_t<std::is_same_v<D, float>, BFloat16, D>;
    const int row = pair >> log2_width_, column = part_.first_row / 2 + column_of(pair), n = arguments_.problem.n;
    if (2 * column >= n) return;
    const Operands& operands = arguments_.operands;
    const int64_t place = int64_t{row} * (n / 2) + column;
    float2 d = {__fmul_rn(sum.x, factor), __fmul_rn(sum.y, factor)};
    if (operands.bias != nullptr) {
      const float2 bias = read_pair<BiasType>(operands.bias, column);
      d = {__fadd_rn(d.x, bias.x), __fadd_rn(d.y, bias.y)};
    }
    if (operands.c != nullptr) {
      const float2 c = read_pair<D>(operands.c, place);
      d = {__fadd_rn(d.x, c.x), __fadd_rn(d.y, c.y)};
    }
    write_pair<D>(operands.d, place, d);
  }

  const Arguments& arguments_;
  const Part& part_;
  uint8_t* const shared_;
  Barrier& received_;
  const int log2_width_, pairs_, block_pairs_;
};

}  // namespace jax_fp8::few_rows_gemm
