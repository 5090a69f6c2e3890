// Attention of one new token of each row to a cache. The kernel is bound by memory: it reads each key and value once.
//
// A key head of a row has a cluster of blocks, or several where many queries share it. The blocks divide the slots that
// are seen, and not those that exist; their warps take turns at batches of slots. At the end the blocks combine their
// softmaxes through distributed shared memory, in an order that never changes. Without clusters one block has all.
//
// The first block writes the new token's key and value. No block reads that slot: it takes both from shared memory.
//
//     bfloat16, 128 features, up to 4 queries: 16 lanes for a slot, 4 slots of keys and 4 of values in the registers of
//     each; 2 blocks of 192 threads on a multiprocessor, with 48 KB of loads in flight
#pragma once

#include <cstdint>

#include "cached_attention_call.cuh"
#include "cached_attention_parts.cuh"
#include "cached_attention_softmax.cuh"
#include "cached_attention_token.cuh"
#include "cluster.cuh"
#include "words.cuh"

namespace jax_fp8::cached_attention {

// The slots that a lane reads at once. More for one query, which needs few registers, and half for float32.
template <typename C, int kHeads>
constexpr int kSlotsAtOnce = sizeof(C) == 4 ? 2 : sizeof(C) == 1 && kHeads == 1 ? 8 : 4;

// ---- keys and values of a batch of slots ----------------------------------------------------------------------------

// The keys or the values of a key head, and which of them this block sees.
template <typename C>
struct Rows {
  const C* rows;        // [slots, head_dim], from the first slot that is seen on
  const float* scales;  // [slots], likewise
  int head_dim, end;    // the number behind the last slot
};

template <typename C>
__device__ inline Rows<C> rows_of(const C* rows, const float* scales, int64_t first, int head_dim, int end) {
  return {rows + first * head_dim, kIsFp8<C> ? scales + first : nullptr, head_dim, end};
}

template <typename C, int kSlots, int kKept>
struct Batch {
  Vector<C> rows[kSlots];
  float scales[kKept];  // of the slots whose sums the lane keeps; only in FP8
};

template <typename C>
__device__ inline Vector<C> load_features(const C* source) {
  constexpr int kBytes = sizeof(Vector<C>);
  Vector<C> loaded;
#pragma unroll
  for (int i = 0; i < kBytes; i += 16) load_words(source, i, kBytes < 16 ? kBytes : 16, loaded.words + i / 4);
  return loaded;
}

// Loads the slots with the numbers from `first` on. What lies outside of the block's slots becomes 0, and is not read.
template <int kLanes, int kHeads, int kSlots, typename C, int kKept>
__device__ inline void load(const Rows<C>& source, const Seen& seen, int first, Batch<C, kSlots, kKept>& batch) {
  using Lanes = Layout<kLanes, kHeads, kSlots>;
  const int feature = static_cast<int>(threadIdx.x) % kLanes * kVectorWidth;
  const int group = static_cast<int>(threadIdx.x) % kWarp / kLanes;
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    const int number = first + j * Lanes::kGroups + group;
    if (number < source.end && feature < source.head_dim) {
      batch.rows[j] = load_features(source.rows + (seen.from_first(number) * source.head_dim + feature));
    } else {
      batch.rows[j] = filled_with<C>(0);
    }
  }
  if constexpr (kIsFp8<C>) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int number = first + Lanes::slot_of(i);
      batch.scales[i] = number < source.end ? __ldcs(source.scales + seen.from_first(number)) : 1.0f;
    }
  }
}

// The products of queries and keys, those that the lane keeps.
template <int kLanes, int kHeads, int kSlots, typename C, int kKept>
__device__ inline void multiply(const float (&query)[kHeads][kVectorWidth], const Batch<C, kSlots, kKept>& keys,
                                float (&kept)[kKept]) {
  float products[kHeads * kSlots];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    float key[kVectorWidth];
    unpack(keys.rows[j], key);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) products[h * kSlots + j] = product(query, key, h);
  }
  divide_sums<kLanes>(products, kept);
  if constexpr (kIsFp8<C>) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[i] = __fmul_rn(kept[i], keys.scales[i]);
  }
}

// From products to weights, those of the slots before `end`. Raises the maximum to theirs.
template <int kLanes, int kHeads, int kSlots, typename C, int kKept>
__device__ inline void weigh(Running<kLanes, kHeads>& running, const Logits& logits, int first, int end,
                             float (&kept)[kKept]) {
  using Lanes = Layout<kLanes, kHeads, kSlots>;
  float raised = running.largest;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    kept[i] = first + Lanes::slot_of(i) < end ? logits.of(kept[i]) : __int_as_float(0xFF800000);
    raised = fmaxf(raised, kept[i]);
  }
  raised = lanes_max<Lanes::kHeadLanes / 2>(raised);
  running.multiply(power_of_2<C>(__fsub_rn(running.largest, raised)));
  running.largest = raised;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    kept[i] = power_of_2<C>(__fsub_rn(kept[i], raised));
    running.sum = __fadd_rn(running.sum, kept[i]);
  }
}

template <int kLanes, int kHeads, int kSlots, typename C, int kKept>
__device__ inline void add(Running<kLanes, kHeads>& running, const Batch<C, kSlots, kKept>& values,
                           float (&weights)[kKept]) {
  using Lanes = Layout<kLanes, kHeads, kSlots>;
  if constexpr (kIsFp8<C>) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) weights[i] = __fmul_rn(weights[i], values.scales[i]);
  }
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    float value[kVectorWidth];
    unpack(values.rows[j], value);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int sum = h * kSlots + j;
      const float weight = __shfl_sync(kAllLanes, weights[sum % kKept], sum / kKept * Lanes::kCopies, kLanes);
#pragma unroll
      for (int i = 0; i < kVectorWidth; ++i) {
        running.attended[h][i] = __fmaf_rn(weight, value[i], running.attended[h][i]);
      }
    }
  }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

// head_dim is at most 8 * kLanes.
template <typename C, int kLanes, int kHeads>
__global__ void __launch_bounds__(kThreads<kHeads>, kResident<kHeads>) attend_kernel(Call<C> call) {
  constexpr int kSlots = kSlotsAtOnce<C, kHeads>, kWidth = kLanes * kVectorWidth;
  using Lanes = Layout<kLanes, kHeads, kSlots>;
  extern __shared__ float4 dynamic[];  // [kWarps, kHeads, kWidth] floats; at first the new token as it arrives
  static_assert(kTokenRows<kHeads> <= kWarps<kHeads> * kHeads);
  __shared__ Shared<kWidth, kHeads> shared;
  float* parts = reinterpret_cast<float*>(dynamic);
  const Part part = part_of<kHeads>(call);
  const Seen seen = seen_by(__ldg(call.lengths + part.row), __ldg(call.step), call.sizes);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const auto first_of = [&](int block) { return static_cast<int>(int64_t{seen.count} * block >> call.log2_blocks); };
  const int end = first_of(part.block + 1);
  const int64_t slot = part.head * call.sizes.slots + seen.first;
  const Rows<C> of_keys = rows_of<C>(call.keys, call.key_scales, slot, call.sizes.head_dim, end);
  const Rows<C> of_values = rows_of<C>(call.values, call.value_scales, slot, call.sizes.head_dim, end);
  int first = first_of(part.block) + warp * Lanes::kBatch;
  Batch<C, kSlots, Lanes::kKept> keys, values;
  load<kLanes, kHeads>(of_keys, seen, first, keys);
  load<kLanes, kHeads>(of_values, seen, first, values);

  fetch_token(call, part, shared, parts);
  __syncthreads();
  put_token(call, part, seen.own, parts, shared);
  __syncthreads();
  const int feature = static_cast<int>(threadIdx.x) % kLanes * kVectorWidth;
  float query[kHeads][kVectorWidth];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) read_fours(shared.query[h] + feature, query[h]);
  Running<kLanes, kHeads> running;
  running.start();
  if (warp == 0 && part.block == 0) {
    float key[kVectorWidth], value[kVectorWidth];
    read_fours(shared.key + feature, key);
    read_fours(shared.value + feature, value);
    begin_with(running, query, key, shared.key_scale, value, shared.value_scale, call.logits, Lanes::kCopies);
  }
  // Loads for the next batch are issued as soon as registers are free.
  for (; first < end; first += kWarps<kHeads> * Lanes::kBatch) {
    const int next = first + kWarps<kHeads> * Lanes::kBatch;
    float weights[Lanes::kKept];
    multiply<kLanes>(query, keys, weights);
    load<kLanes, kHeads>(of_keys, seen, next, keys);
    weigh<kLanes, kHeads, kSlots, C>(running, call.logits, first, end, weights);
    add<kLanes, kHeads>(running, values, weights);
    load<kLanes, kHeads>(of_values, seen, next, values);
  }

  combine_groups<C, kLanes, kHeads, Lanes::kCopies>(running, shared, parts);
  __syncthreads();
  combine_warps<C>(shared, part.queries, parts);
  if (call.log2_blocks == 0) {
    __syncthreads();
    combine_blocks(call, part, shared, parts);
    return;
  }
  arrive_at_cluster();
  wait_for_cluster();
  combine_blocks(call, part, shared, parts);
  // A block must not exit while others read its shared memory. What they read has arrived: they have stored it.
  arrive_at_cluster_with_nothing();
  wait_for_cluster();
}

}  // namespace jax_fp8::cached_attention
