// What the new token brings to its attention: queries and a key, rotated, and a value. All become floats in shared
// memory, rounded as they are kept.
//
// The block loads all of it at once, and rotates when it has arrived. A load for each pair of features would wait for
// the one before.
#pragma once

#include <cstdint>

#include "cached_attention_call.cuh"
#include "fp8.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace jax_fp8::cached_attention {

template <int kWidth, int kHeads>
struct Shared {
  alignas(16) float query[kHeads][kWidth];
  alignas(16) float key[kWidth];
  alignas(16) float value[kWidth];
  float cos[kWidth / 2], sin[kWidth / 2];
  float key_scale, value_scale;
  float largest[kWarps<kHeads>][kHeads], sums[kWarps<kHeads>][kHeads];  // of the warps
  float block_largest[kHeads], block_sums[kHeads];
};

// The rows of the new token as they arrive: the queries, the key and the value.
template <int kHeads>
constexpr int kTokenRows = kHeads + 2;

__device__ inline void load_eight(const void* source, int64_t index, SourceType type, float (&x)[kVectorWidth]) {
  switch (type) {
    case SourceType::kFloat32: return unpack(load_vector(static_cast<const float*>(source) + index), x);
    case SourceType::kBFloat16: return unpack(load_vector(static_cast<const BFloat16*>(source) + index), x);
    default: return unpack(load_vector(static_cast<const Float16*>(source) + index), x);
  }
}

__device__ inline void put_eight(float* target, const float (&x)[kVectorWidth]) {
  float4* fours = reinterpret_cast<float4*>(target);
  fours[0] = make_float4(x[0], x[1], x[2], x[3]);
  fours[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Loads the rows to `raw`, [kTokenRows, kWidth], and the angles. Features beyond the last, and queries that this block
// does not have, are 0. A barrier must follow.
template <typename C, int kWidth, int kHeads>
__device__ inline void fetch_token(const Call<C>& call, const Part& part, Shared<kWidth, kHeads>& shared, float* raw) {
  constexpr int kVectors = kWidth / kVectorWidth;
  const int head_dim = call.sizes.head_dim;
  for (int item = static_cast<int>(threadIdx.x); item < kTokenRows<kHeads> * kVectors; item += kThreads<kHeads>) {
    const int row = item / kVectors, feature = item % kVectors * kVectorWidth;
    const void* source = row < kHeads ? call.query : row == kHeads ? call.key : call.value;
    const int64_t in_source = row < kHeads ? part.head * call.sizes.queries + part.first_query + row : part.head;
    float x[kVectorWidth] = {};
    if (feature < head_dim && (row >= kHeads || row < part.queries)) {
      load_eight(source, in_source * head_dim + feature, call.type, x);
    }
    put_eight(raw + item * kVectorWidth, x);
  }
  const int64_t first = int64_t{part.row} * call.pairs;
  for (int pair = static_cast<int>(threadIdx.x); pair < call.pairs; pair += kThreads<kHeads>) {
    shared.cos[pair] = __ldg(call.cos + first + pair);
    shared.sin[pair] = __ldg(call.sin + first + pair);
  }
}

__device__ inline float rounded(float x, SourceType type) {
  switch (type) {
    case SourceType::kFloat32: return x;
    case SourceType::kBFloat16: return to_float(from_float<BFloat16>(x));
    default: return to_float(from_float<Float16>(x));
  }
}

// Eight features of a row, rotated, with the roundings of ops/rotary.py. Features i and i + pairs are a pair.
template <typename OfBlock>
__device__ inline void rotate(const float* row, int feature, int pairs, SourceType type, const OfBlock& shared,
                              float (&x)[kVectorWidth]) {
#pragma unroll
  for (int i = 0; i < kVectorWidth; ++i) {
    const int at = feature + i;
    x[i] = row[at];
    if (at >= 2 * pairs) continue;
    const bool is_first = at < pairs;
    const int pair = is_first ? at : at - pairs;
    const float other = row[is_first ? at + pairs : pair];
    const float along = __fmul_rn(x[i], shared.cos[pair]), across = __fmul_rn(other, shared.sin[pair]);
    x[i] = rounded(is_first ? __fsub_rn(along, across) : __fadd_rn(along, across), type);
  }
}

// Eight features of the new key or value as the cache keeps them. `x` becomes what `kept` holds, without the scale.
template <typename C>
struct NewRow {
  float scale;  // 1 without FP8
  Vector<C> kept;
};

// Every lane of the warp must call it; together they have the row.
template <typename C>
__device__ inline NewRow<C> new_row(float (&x)[kVectorWidth]) {
  NewRow<C> row;
  row.scale = 1.0f;
  if constexpr (kIsFp8<C>) {
    const uint32_t amax = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(amax_of(0.0f, x)));
    row.scale = scale_from_amax<Fp8Type::kE4M3>(__uint_as_float(amax), {1.0f, 0.0f, false});
    const float multiplier = multiplier_of(row.scale);
    row.kept.words[0] = quantize_four<Fp8Type::kE4M3>(x, multiplier);
    row.kept.words[1] = quantize_four<Fp8Type::kE4M3>(x + 4, multiplier);
    unpack(row.kept, x);
  } else {
    pack(x, row.kept);
  }
  return row;
}

// Writes the new key or value into its slot of the cache.
template <typename C>
__device__ inline void keep_row(const NewRow<C>& row, const Sizes& sizes, int64_t slot, C* rows, float* scales) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, feature = lane * kVectorWidth;
  if (feature < sizes.head_dim) {
    C* target = rows + slot * sizes.head_dim + feature;
    if constexpr (kIsFp8<C>) {
      *reinterpret_cast<uint2*>(target) = make_uint2(row.kept.words[0], row.kept.words[1]);
    } else {
      store_vector(target, row.kept);
    }
  }
  if constexpr (kIsFp8<C>) {
    if (lane == 0) scales[slot] = row.scale;
  }
}

// From `raw` to shared memory, and if this block writes it, to the cache: the first warp has the key, the second one
// the value, and the others the queries. A barrier must follow.
template <typename C, int kWidth, int kHeads>
__device__ inline void put_token(const Call<C>& call, const Part& part, int own, const float* raw,
                                 Shared<kWidth, kHeads>& shared) {
  constexpr int kVectors = kWidth / kVectorWidth;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int64_t slot = part.head * call.sizes.slots + own;
  float x[kVectorWidth] = {};
  if (warp >= 2) {
    for (int item = thread - 2 * kWarp; item < kHeads * kVectors; item += kThreads<kHeads> - 2 * kWarp) {
      const int h = item / kVectors, feature = item % kVectors * kVectorWidth;
      rotate(raw + h * kWidth, feature, call.pairs, call.type, shared, x);
      put_eight(shared.query[h] + feature, x);
    }
    return;
  }
  const bool is_key = warp == 0, exists = lane < kVectors;
  if (exists) {
    const float* row = raw + (kHeads + warp) * kWidth;
    rotate(row, lane * kVectorWidth, is_key ? call.pairs : 0, call.type, shared, x);
  }
  const NewRow<C> row = new_row<C>(x);
  if (exists) put_eight((is_key ? shared.key : shared.value) + lane * kVectorWidth, x);
  if (lane == 0) (is_key ? shared.key_scale : shared.value_scale) = row.scale;
  if (part.writes) {
    keep_row(row, call.sizes, slot, is_key ? call.keys : call.values, is_key ? call.key_scales : call.value_scales);
  }
}

}  // namespace jax_fp8::cached_attention
