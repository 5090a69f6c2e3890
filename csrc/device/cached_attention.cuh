// Attention of one new token of each row to a cache. The kernel is bound by memory: it reads each key and value once.
// With few rows it is bound by latency, and by how fast its instructions arrive: code that runs once is kept short.
//
// A key head of a row has a cluster of blocks, or several where many queries share it. The blocks divide the slots that
// are seen, and not those that exist; their warps take turns at tiles of slots. At the end the blocks send each other
// their softmaxes through distributed shared memory and combine them, in an order that never changes. Without clusters
// one block has all.
//
// The first block also has the new token's key and value, and writes them. No block reads that slot: its weight is
// combined like another warp's.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cached_attention_call.cuh"
#include "cached_attention_early.cuh"
#include "cached_attention_floats.cuh"
#include "cached_attention_parts.cuh"
#include "cached_attention_products.cuh"
#include "cached_attention_shared.cuh"
#include "cached_attention_token.cuh"
#include "programmatic.cuh"

namespace jax_fp8::cached_attention {

template <typename C, typename T, int kWidth, int kHeads, int kWarps>
struct WalkFor {
  using Type = Walk<C, T, kWidth, kHeads, kWarps>;
};
template <int kWidth, int kHeads, int kWarps>
struct WalkFor<float, float, kWidth, kHeads, kWarps> {
  using Type = FloatWalk<kWidth, kHeads, kWarps>;
};

// head_dim is at most kWidth, and more than half of it unless kWidth is 64.
template <typename C, typename T, int kWidth, int kHeads, int kWarps>
__global__ void __launch_bounds__(kWarps * kWarp, kResident<C, kWidth, kWarps>) attend_kernel(Call<C, T> call) {
  extern __shared__ float4 parts[];  // [kWarps, queries, kPartWidth] floats
  __shared__ Shared<C, T, kWidth, kHeads> shared;
  let_next_kernel_begin();
  const Part part = part_of<kHeads>(call);
  const int length = __ldg(call.lengths + part.row), step = __ldg(call.step);
  const auto first_of = [&](const Seen& seen, int block) {
    return static_cast<int>(int64_t{seen.count} * block >> call.log2_blocks);
  };
  const Seen seen = seen_by(length, step, call.sizes);
  const int first = first_of(seen, part.block), end = first_of(seen, part.block + 1);
  if (call.asks_early) ask_for_slots(call, part, seen, first, end);
  const Results<C, T, kWidth, kHeads, kWarps> results(call, part, shared);
  const int64_t slot = int64_t{part.head} * call.sizes.slots + seen.first;
  const Rows<C> keys(call.keys, call.key_scales, slot, call.sizes.head_dim);
  const Rows<C> values(call.values, call.value_scales, slot, call.sizes.head_dim);
  typename WalkFor<C, T, kWidth, kHeads, kWarps>::Type walk(call, keys, values, {seen, first, end});
  wait_for_kernels_before();
  const int warp = static_cast<int>(threadIdx.x) / kWarp, token_rows = TokenRows(part).count;
  TokenRow<T, kWidth> fetched;
  if (warp < token_rows) fetched = fetch_row<kWidth>(call, part, warp);

#pragma unroll 1
  for (int row = warp; row < token_rows;) {
    put_row(call, part, seen.own, row, fetched, shared);
    row += kWarps;
    if (row < token_rows) fetched = fetch_row<kWidth>(call, part, row);
  }
  __syncthreads();
  if (part.sees_token()) {
#pragma unroll 1
    for (int h = warp; h < part.queries; h += kWarps) {
      const float logit = call.logits.of(own_product(shared, h));
      if (threadIdx.x % kWarp == 0) shared.own_logits[h] = logit;
    }
  }
  walk.run(part.queries, shared, reinterpret_cast<float*>(parts));
  __syncthreads();
  results.write(reinterpret_cast<const float*>(parts));
}

}  // namespace jax_fp8::cached_attention
