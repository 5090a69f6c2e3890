// What the new token brings to its attention: queries and a key, which are rotated, and a value. A warp has a row of
// them, and a lane pairs of its features.
//
// The first block of a cluster has the key and the value. It writes them to the cache as they are kept there, and
// leaves them as floats in shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cached_attention_call.cuh"
#include "cached_attention_shared.cuh"
#include "fp8.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace jax_fp8::cached_attention {

// The compiler may move `__ldg` before a wait for the kernel that writes these rows.
__device__ inline float load_one(const float* source) { return __ldcg(source); }

template <typename T>
__device__ inline T load_one(const T* source) {
  return {__ldcg(&source->bits)};
}

// The rows of the new token that a block has, in order: its queries, then the key and the value.
struct TokenRows {
  int queries, count;

  __device__ explicit TokenRows(const Part& part)
      : queries(part.queries), count(part.sees_token() ? part.queries + 2 : part.queries) {}
  __device__ bool is_query(int row) const { return row < queries; }
  __device__ bool is_key(int row) const { return row == queries; }
  __device__ bool is_value(int row) const { return row == queries + 1; }
};

// Which two features of a row are a lane's j-th pair: i and i + pairs while these are rotated, and neighbours behind.
struct FeaturePair {
  int angle, first, second;
  bool is_rotated;

  __device__ FeaturePair(int j, int pairs) {
    angle = static_cast<int>(threadIdx.x) % kWarp + j * kWarp;
    is_rotated = angle < pairs;
    first = is_rotated ? angle : 2 * angle, second = is_rotated ? angle + pairs : first + 1;
  }
};

// A lane's features of a row as they arrive. Those beyond the last one are 0.
template <typename T, int kWidth>
struct TokenRow {
  static constexpr int kPairs = kWidth / 2 / kWarp;
  T first[kPairs], second[kPairs];
  float cos[kPairs], sin[kPairs];
};

template <int kWidth, typename C, typename T>
__device__ inline TokenRow<T, kWidth> fetch_row(const Call<C, T>& call, const Part& part, int row) {
  const TokenRows rows(part);
  const int head_dim = call.sizes.head_dim, pairs = rows.is_value(row) ? 0 : call.pairs;
  const int64_t query = int64_t{part.head} * call.sizes.queries + part.first_query + row;
  const int64_t first = rows.is_query(row) ? query : part.head;
  const T* source = (rows.is_query(row) ? call.query : rows.is_key(row) ? call.key : call.value) + first * head_dim;
  const int64_t angles = int64_t{part.row} * call.pairs;
  TokenRow<T, kWidth> fetched;
#pragma unroll
  for (int j = 0; j < fetched.kPairs; ++j) {
    const FeaturePair pair(j, pairs);
    const bool exists = pair.second < head_dim;
    fetched.first[j] = exists ? load_one(source + pair.first) : T{};
    fetched.second[j] = exists ? load_one(source + pair.second) : T{};
    fetched.cos[j] = pair.is_rotated ? __ldg(call.cos + angles + pair.angle) : 1.0f;
    fetched.sin[j] = pair.is_rotated ? __ldg(call.sin + angles + pair.angle) : 0.0f;
  }
  return fetched;
}

template <typename T>
__device__ inline float rounded(float x) {
  return to_float(from_float<T>(x));
}

// The features of a lane, rotated with the roundings of ops/rotary.py.
template <typename T, int kWidth>
__device__ inline void rotate(const TokenRow<T, kWidth>& row, int pairs, float (&first)[kWidth / 2 / kWarp],
                              float (&second)[kWidth / 2 / kWarp]) {
#pragma unroll
  for (int j = 0; j < row.kPairs; ++j) {
    const float x = to_float(row.first[j]), y = to_float(row.second[j]);
    const bool is_rotated = FeaturePair(j, pairs).is_rotated;
    const float along = __fsub_rn(__fmul_rn(x, row.cos[j]), __fmul_rn(y, row.sin[j]));
    const float across = __fadd_rn(__fmul_rn(y, row.cos[j]), __fmul_rn(x, row.sin[j]));
    first[j] = is_rotated ? rounded<T>(along) : x, second[j] = is_rotated ? rounded<T>(across) : y;
  }
}

// The largest magnitude of a row. Every lane of the warp must call it.
template <int kPairs>
__device__ inline float amax_of_row(const float (&first)[kPairs], const float (&second)[kPairs]) {
  const float amax = amax_of(amax_of(0.0f, first), second);
  return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(amax)));
}

// A query as the operands of the products.
template <typename C, typename T, int kWidth, int kHeads>
__device__ inline void put_query(int h, int pairs, const float (&first)[kWidth / 2 / kWarp],
                                 const float (&second)[kWidth / 2 / kWarp], Shared<C, T, kWidth, kHeads>& shared) {
  float multiplier = 1.0f;
  if constexpr (kIsFp8<C>) {
    const int exponent = exponent_of(amax_of_row(first, second)) - kLargestOperand;
    multiplier = power_of_two(-exponent);
    if (threadIdx.x % kWarp == 0) shared.units[h] = power_of_two(exponent);
  }
  const auto put = [&](int feature, float x) {
    x = __fmul_rn(x, multiplier);
    shared.query[0][h][feature] = from_float<Operand<C>>(x);
    if constexpr (kOperands<C, T> == 2) {
      const float rest = __fsub_rn(x, to_float(shared.query[0][h][feature]));
      shared.query[1][h][feature] = from_float<Operand<C>>(rest);
    }
  };
#pragma unroll
  for (int j = 0; j < kWidth / 2 / kWarp; ++j) {
    const FeaturePair pair(j, pairs);
    put(pair.first, first[j]), put(pair.second, second[j]);
  }
}

// The new key or value as the cache keeps it.
template <typename C>
struct NewRow {
  C* cache;            // its slot; null if another block writes it
  float* cache_scale;  // likewise; only in FP8
  float* shared;
};

template <typename C, int kWidth>
__device__ inline void put_new_row(const NewRow<C>& row, int head_dim, int pairs,
                                   const float (&first)[kWidth / 2 / kWarp],
                                   const float (&second)[kWidth / 2 / kWarp]) {
  float scale = 1.0f, multiplier = 1.0f;
  if constexpr (kIsFp8<C>) {
    scale = scale_from_amax<Fp8Type::kE4M3>(amax_of_row(first, second), {1.0f, 0.0f, false});
    multiplier = multiplier_of(scale);
    if (threadIdx.x % kWarp == 0 && row.cache != nullptr) *row.cache_scale = scale;
  }
  const auto put = [&](int feature, float x) {
    C kept;
    if constexpr (kIsFp8<C>) {
      kept = {quantize_one<Fp8Type::kE4M3>(x, multiplier)};
      float none;
      uncast_pair<Fp8Type::kE4M3>(kept.bits, x, none);
      x = __fmul_rn(x, scale);
    } else {
      kept = from_float<C>(x);
    }
    row.shared[feature] = x;
    if (row.cache != nullptr && feature < head_dim) row.cache[feature] = kept;
  };
#pragma unroll
  for (int j = 0; j < kWidth / 2 / kWarp; ++j) {
    const FeaturePair pair(j, pairs);
    put(pair.first, first[j]), put(pair.second, second[j]);
  }
}

// Leaves a row in shared memory, and if this block writes it, in the cache.
template <typename C, typename T, int kWidth, int kHeads>
__device__ inline void put_row(const Call<C, T>& call, const Part& part, int own, int row,
                               const TokenRow<T, kWidth>& fetched, Shared<C, T, kWidth, kHeads>& shared) {
  const TokenRows rows(part);
  const int pairs = rows.is_value(row) ? 0 : call.pairs;
  float first[kWidth / 2 / kWarp], second[kWidth / 2 / kWarp];
  rotate<T, kWidth>(fetched, pairs, first, second);
  if (rows.is_query(row)) return put_query(row, pairs, first, second, shared);
  const bool is_key = rows.is_key(row);
  const int64_t slot = int64_t{part.head} * call.sizes.slots + own;
  C* cache = (is_key ? call.keys : call.values) + slot * call.sizes.head_dim;
  float* scales = is_key ? call.key_scales : call.value_scales;
  const NewRow<C> kept{part.writes ? cache : nullptr, kIsFp8<C> ? scales + slot : nullptr,
                       is_key ? shared.key : shared.value};
  put_new_row<C, kWidth>(kept, call.sizes.head_dim, pairs, first, second);
}

// The product of a query with the new token's own key, which must be in shared memory. Every lane must call it.
template <typename C, typename T, int kWidth, int kHeads>
__device__ inline float own_product(const Shared<C, T, kWidth, kHeads>& shared, int h) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kWidth / kWarp; ++j) {
    const int feature = static_cast<int>(threadIdx.x) % kWarp + j * kWarp;
#pragma unroll
    for (int part = 0; part < kOperands<C, T>; ++part) {
      sum = __fmaf_rn(to_float(shared.query[part][h][feature]), shared.key[feature], sum);
    }
  }
  return __fmul_rn(warp_sum(sum), kIsFp8<C> ? shared.units[h] : 1.0f);
}

}  // namespace jax_fp8::cached_attention
