// The softmaxes of warps and of blocks become one: each is scaled to the largest logit of all. The order never changes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "async_copy.cuh"
#include "cached_attention_call.cuh"
#include "cached_attention_shared.cuh"
#include "cluster.cuh"
#include "exponential.cuh"
#include "fp8.cuh"

namespace jax_fp8::cached_attention {

// Of a query, and two neighbouring features of it.
struct PairSoftmax {
  float largest, sum;
  float2 attended;

  template <typename C>
  __device__ void add(float other_largest, float other_sum, float2 other) {
    const float factor = power_of_2<C>(__fsub_rn(other_largest, largest));
    sum = __fmaf_rn(factor, other_sum, sum);
    attended = {__fmaf_rn(factor, other.x, attended.x), __fmaf_rn(factor, other.y, attended.y)};
  }
};

// The results of a block: its queries, in pairs of neighbouring features. The blocks of a cluster take turns at
// receiving the sums of a pair.
template <typename C, typename T, int kWidth, int kHeads, int kWarps>
class Results {
 public:
  // Begins the barrier of what the block receives.
  __device__ Results(const Call<C, T>& call, const Part& part, Shared<C, T, kWidth, kHeads>& shared)
      : call_(call), part_(part), shared_(shared),
        scale_(casts() ? __ldg(call.attended_scale) : 1.0f) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (call.log2_blocks == 0) return;
    if (threadIdx.x == 0) {
      start(shared.arrived, 1);
      publish_barriers();
      arrive_and_expect(shared.arrived, part.queries * (kRowPairs + call.blocks()) * 8);
    }
    arrive_at_cluster_with_nothing();
#endif
  }

  // `parts` has the sums of the warps, [kWarps, queries, kPartWidth]. A barrier must have followed them.
  __device__ void write(const float* parts) const {
    const int pairs = part_.queries * kRowPairs, first = static_cast<int>(threadIdx.x);
    if (call_.log2_blocks == 0) {
      for (int pair = first; pair < pairs; pair += kThreads) write_pair(pair, combine_warps(parts, pair));
      return;
    }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    wait_for_cluster();  // all have begun their barriers
    for (int pair = first; pair < pairs; pair += kThreads) send_pair(pair, combine_warps(parts, pair));
    wait(shared_.arrived, 0);
    for (int item = first; item < pairs; item += kThreads) {
      const int pair = item - block_of(item) + part_.block;
      const PairSoftmax combined = combine_blocks(item, pair / kRowPairs);
      if (block_of(item) == 0) write_pair(pair, combined);
    }
#endif
  }

 private:
  static constexpr int kThreads = kWarps * kWarp, kRowPairs = kWidth / 2;
  static constexpr bool kMayCast = std::is_same_v<T, BFloat16>;
  static_assert(kRowPairs % kMostBlocks == 0);

  // Whether the result is cast to E4M3.
  __device__ bool casts() const { return kMayCast && call_.attended_scale != nullptr; }

  // Pairs, and what is received of them, are numbered alike: a pair's receiver is as an item's sender.
  __device__ int block_of(int item) const { return item & (call_.blocks() - 1); }

  __device__ PairSoftmax combine_warps(const float* parts, int pair) const {
    const int h = pair / kRowPairs, feature = pair % kRowPairs * 2;
    PairSoftmax all{part_.sees_token() ? fmaxf(kLowest, shared_.own_logits[h]) : kLowest, 0.0f, {0.0f, 0.0f}};
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) all.largest = fmaxf(all.largest, shared_.largest[warp][h]);
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const float* sums = parts + (warp * part_.queries + h) * kPartWidth<kWidth> + feature;
      all.add<C>(shared_.largest[warp][h], shared_.sums[warp][h], *reinterpret_cast<const float2*>(sums));
    }
    if (part_.sees_token()) {
      all.add<C>(shared_.own_logits[h], 1.0f, {shared_.value[feature], shared_.value[feature + 1]});
    }
    return all;
  }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  // To the block that has the pair; and the softmax of its query to each block once.
  __device__ void send_pair(int pair, const PairSoftmax& softmax) const {
    const int h = pair / kRowPairs, in_row = pair % kRowPairs, block = block_of(pair);
    send(softmax.attended, shared_.received + (pair - block) + part_.block, shared_.arrived, block);
    if (in_row < call_.blocks()) {
      send(float2{softmax.largest, softmax.sum}, shared_.received_softmaxes + (h << call_.log2_blocks) + part_.block,
           shared_.arrived, in_row);
    }
  }

  // Neighbouring lanes have the blocks of a pair. All of them get the result.
  __device__ PairSoftmax combine_blocks(int item, int h) const {
    const float2 softmax = shared_.received_softmaxes[(h << call_.log2_blocks) + block_of(item)];
    PairSoftmax all{softmax.x, 0.0f, {0.0f, 0.0f}};
#pragma unroll 1
    for (int distance = call_.blocks() / 2; distance > 0; distance /= 2) {
      all.largest = fmaxf(all.largest, __shfl_xor_sync(0xFFFFFFFFu, all.largest, distance));
    }
    all.add<C>(softmax.x, softmax.y, shared_.received[item]);
#pragma unroll 1
    for (int distance = call_.blocks() / 2; distance > 0; distance /= 2) {
      all.sum = __fadd_rn(all.sum, __shfl_xor_sync(0xFFFFFFFFu, all.sum, distance));
      all.attended.x = __fadd_rn(all.attended.x, __shfl_xor_sync(0xFFFFFFFFu, all.attended.x, distance));
      all.attended.y = __fadd_rn(all.attended.y, __shfl_xor_sync(0xFFFFFFFFu, all.attended.y, distance));
    }
    return all;
  }
#endif

  __device__ void write_pair(int pair, const PairSoftmax& softmax) const {
    const int h = pair / kRowPairs, feature = pair % kRowPairs * 2, head_dim = call_.sizes.head_dim;
    if (feature >= head_dim) return;
    const float x = __fdividef(softmax.attended.x, softmax.sum), y = __fdividef(softmax.attended.y, softmax.sum);
    const int64_t row = int64_t{part_.head} * call_.sizes.queries + part_.first_query + h;
    T* target = call_.attended + row * head_dim + feature;
    if (casts()) {
      const float multiplier = multiplier_of(scale_);
      float two[2];
      unpack(pack(x, y, BFloat16{}), two, BFloat16{});
      auto* const bytes = reinterpret_cast<uint16_t*>(call_.attended) + (row * head_dim + feature) / 2;
      *bytes = cast_pair<Fp8Type::kE4M3>(__fmul_rn(two[0], multiplier), __fmul_rn(two[1], multiplier));
    } else if constexpr (std::is_same_v<T, float>) {
      *reinterpret_cast<float2*>(target) = {x, y};
    } else {
      *reinterpret_cast<uint32_t*>(target) = pack(x, y, T{});
    }
  }

  const Call<C, T>& call_;
  const Part& part_;
  Shared<C, T, kWidth, kHeads>& shared_;
  const float scale_;  // of a cast of the result
};

}  // namespace jax_fp8::cached_attention
