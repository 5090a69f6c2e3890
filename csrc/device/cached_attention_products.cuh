// Attention to a cache of 16-bit or 8-bit elements, on the tensor cores. A warp takes tiles of 16 or 32 slots.
//
//     logits[queries, slots] = query[queries, features] · keys[slots, features]ᵀ       16 x 8 x 16 at once, twice
//     attended[features, queries] += values[slots, features]ᵀ · weights[queries, slots]ᵀ
//
// The 8 columns of the second product are 8 queries, and the first one has them in the upper half of its 16 rows. So
// the weights lie on the lanes as the next product needs them: of each 16 slots, lane 4 g + t has query g and the slots
// 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
//
// Weights are rounded to 16 bits, and so are what this drops of them: together they have 16 bits or more. Values in FP8
// are multiplied by their scales in the weights. Scales have a wider range than float16, and a slot with a large one
// may have next to no weight. So these products are relative to the query's largest product of weight and scale, and
// what is less than 2**-38 of it vanishes. So do weights below 2**-126.
#pragma once

#include <cstdint>

#include "cached_attention_call.cuh"
#include "cached_attention_shared.cuh"
#include "cached_attention_slots.cuh"
#include "exponential.cuh"
#include "mma.cuh"
#include "vector.cuh"

namespace jax_fp8::cached_attention {

constexpr int kMostQueriesOfProducts = 8;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// The maximum over the four lanes of a query.
__device__ inline uint32_t query_max(uint32_t x) {
  x = max(x, __shfl_xor_sync(kAllLanes, x, 2));
  return max(x, __shfl_xor_sync(kAllLanes, x, 1));
}

__device__ inline float query_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
}

// What the lanes of a query have, for the lanes that have its sums: of the query 2 t + kSecond.
template <int kSecond>
__device__ inline float of_sums(float x) {
  return __shfl_sync(kAllLanes, x, 8 * lane_column() + 4 * kSecond);
}

// ---- the softmax of a warp ------------------------------------------------------------------------------------------

constexpr int kLowestExponent = -126;  // of a float

template <typename C, int kWidth>
struct WarpSoftmax {
  static constexpr int kTiles = kWidth / 16;
  // Tile 4 c + i has the features 64 c + 8 g + 2 i (floats 0 and 1) and the next one, for queries 2 t and 2 t + 1. In
  // units of 2**(largest + exponent).
  float attended[kTiles][4];
  float largest;  // logit, of the lane's query; in FP8 rounded up to a whole number
  float sum;      // of the weights that the lane computed
  int exponent;   // of the query's largest product of weight and scale, less kLargestOperand; only in FP8

  __device__ void start() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) attended[tile][i] = 0.0f;
    }
    largest = kLowest, sum = 0.0f, exponent = kLowestExponent;
  }

  // Multiplies the sums of each query by the factor that its lanes have. Mostly all are 1.
  __device__ void multiply(float factor) {
    if (!__any_sync(kAllLanes, factor != 1.0f)) return;
    const float first = of_sums<0>(factor), second = of_sums<1>(factor);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) attended[tile][i] = __fmul_rn(attended[tile][i], i % 2 == 0 ? first : second);
    }
  }
};

// The products of the lane's query with the keys of its slots, times `factor`.
template <typename C, typename T, int kWidth, int kHeads, int kTile>
__device__ inline void multiply(const Shared<C, T, kWidth, kHeads>& shared, int query, float factor,
                                const Keys<C, kWidth, kTile>& keys, float (&products)[kTile / 4]) {
  float sums[kTile / 8][4] = {};
#pragma unroll
  for (int c = 0; c < kWidth / 32; ++c) {
    uint32_t rows[2][4] = {};  // of the operands' upper and lower halves
#pragma unroll
    for (int part = 0; part < kOperands<C, T>; ++part) {
      const Vector<Operand<C>> own = read_vector(shared.query[part][query] + 32 * c + 8 * lane_column());
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[part][i] = own.words[i];
    }
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      uint32_t words[4];
      to_operands(keys.rows[j][c], words);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        multiply_add(sums[j], {rows[0][i], rows[1][i], rows[0][i + 1], rows[1][i + 1]}, {words[i], words[i + 1]},
                     Operand<C>{});
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTile / 4; ++i) {
    products[i] = sums[i / 2][i % 2];
    if constexpr (kOperands<C, T> == 2) products[i] = __fadd_rn(products[i], sums[i / 2][2 + i % 2]);
    products[i] = __fmul_rn(products[i], kIsFp8<C> ? __fmul_rn(keys.scales[i], factor) : factor);
  }
}

// From scaled products to weights, those of the tile's first `count` slots. Raises the maximum to theirs, and returns
// the difference of the old one to the new one.
template <typename C, int kWidth, int kCount>
__device__ inline float weigh(WarpSoftmax<C, kWidth>& softmax, float cap, int count, float (&weights)[kCount]) {
  if (__builtin_expect(cap != 0.0f, 0)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) weights[i] = __fmul_rn(tanhf(weights[i]), cap);
  }
  float raised = softmax.largest;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (slot_of(i) >= count) weights[i] = __int_as_float(0xFF800000);
    raised = fmaxf(raised, weights[i]);
  }
  raised = query_max(raised);
  if constexpr (kIsFp8<C>) raised = ceilf(raised);
  const float difference = __fsub_rn(softmax.largest, raised);
  softmax.largest = raised, softmax.sum = __fmul_rn(softmax.sum, power_of_2<C>(difference));
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    weights[i] = power_of_2<C>(__fsub_rn(weights[i], raised));
    softmax.sum = __fadd_rn(softmax.sum, weights[i]);
  }
  return difference;
}

// The factor of earlier sums, from the difference of the largest logits. In FP8, multiplies weights by the scales of
// their values, in units of a power of two that brings them below 2**16, the range of float16.
template <typename C, int kWidth, int kCount>
__device__ inline float scale_weights(WarpSoftmax<C, kWidth>& softmax, float difference,
                                      const float (&scales)[kCount], float (&weights)[kCount]) {
  if constexpr (!kIsFp8<C>) return power_of_2<C>(difference);
  // The sum of two floats' bits has the exponent of their product, or one less, in a wider range than a float has.
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t bits = __float_as_uint(weights[i]) + __float_as_uint(scales[i]);
    largest = max(largest, weights[i] > 0.0f ? bits : 0);
  }
  const int own = static_cast<int>(query_max(largest) >> 23) - 2 * 127 - kLargestOperand;
  const int earlier = softmax.exponent + static_cast<int>(fmaxf(difference, -512.0f));  // relative to the new logit
  softmax.exponent = max(max(own, earlier), kLowestExponent);
  const float unit = power_of_two(-softmax.exponent);
#pragma unroll
  for (int i = 0; i < kCount; ++i) weights[i] = __fmul_rn(__fmul_rn(weights[i], unit), scales[i]);
  return power_of_two(max(earlier - softmax.exponent, kLowestExponent - 1));  // or 0
}

// Adds the values of the lane's slots, each of their weights as the sum of two operands.
template <typename C, int kWidth, int kTile>
__device__ inline void add(WarpSoftmax<C, kWidth>& softmax, const Values<C, kWidth, kTile>& values,
                           const float (&weights)[kTile / 4]) {
  using Type = Operand<C>;
  uint32_t upper[kTile / 8], lower[kTile / 8];
#pragma unroll
  for (int j = 0; j < kTile / 8; ++j) {
    float kept[2];
    upper[j] = pack(weights[2 * j], weights[2 * j + 1], Type{});
    unpack(upper[j], kept, Type{});
    lower[j] = pack(__fsub_rn(weights[2 * j], kept[0]), __fsub_rn(weights[2 * j + 1], kept[1]), Type{});
  }
#pragma unroll
  for (int j = 0; j < kTile / 8; j += 2) {
#pragma unroll
    for (int c = 0; c < kWidth / 64; ++c) {
      uint32_t words[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) to_operands(values.rows[2 * j + i][c], words[i]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // From pairs of features to pairs of slots.
        const uint32_t pairs[4] = {__byte_perm(words[0][i], words[1][i], 0x5410),
                                   __byte_perm(words[0][i], words[1][i], 0x7632),
                                   __byte_perm(words[2][i], words[3][i], 0x5410),
                                   __byte_perm(words[2][i], words[3][i], 0x7632)};
        multiply_add(softmax.attended[4 * c + i], pairs, {upper[j], upper[j + 1]}, Type{});
        multiply_add(softmax.attended[4 * c + i], pairs, {lower[j], lower[j + 1]}, Type{});
      }
    }
  }
}

// Leaves the warp's softmax in shared memory: `sums` [queries, kPartWidth] of this warp.
template <typename C, typename T, int kWidth, int kHeads>
__device__ inline void leave(const WarpSoftmax<C, kWidth>& softmax, int queries, Shared<C, T, kWidth, kHeads>& shared,
                             float* sums) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  float sum = __fadd_rn(softmax.sum, __shfl_xor_sync(kAllLanes, softmax.sum, 2));
  sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, 1));
  if (lane_column() == 0) shared.largest[warp][lane_row()] = softmax.largest, shared.sums[warp][lane_row()] = sum;
  float units[2];
  if constexpr (kIsFp8<C>) {
    const float unit = power_of_two(softmax.exponent);
    units[0] = of_sums<0>(unit), units[1] = of_sums<1>(unit);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int query = 2 * lane_column() + i;
    if (query >= queries) continue;
#pragma unroll
    for (int tile = 0; tile < softmax.kTiles; tile += 2) {
      float four[4] = {softmax.attended[tile][i], softmax.attended[tile][i + 2], softmax.attended[tile + 1][i],
                       softmax.attended[tile + 1][i + 2]};
      if constexpr (kIsFp8<C>) {
#pragma unroll
        for (float& x : four) x = __fmul_rn(x, units[i]);
      }
      float* target = sums + query * kPartWidth<kWidth> + tile / 4 * 64 + 8 * lane_row() + tile % 4 * 2;
      *reinterpret_cast<float4*>(target) = make_float4(four[0], four[1], four[2], four[3]);
    }
  }
}

// ---- the block's slots ----------------------------------------------------------------------------------------------

// The first tile is loaded before the new token, and the rest follows. With 256 features of 16 bits, the registers do
// not hold all keys and values of a tile beside the sums, so most of the values are loaded when the keys are done.
template <typename C, typename T, int kWidth, int kHeads, int kWarps>
class Walk {
  static constexpr int kTile = kTileSlots<C, kWidth, kWarps>;

 public:
  __device__ Walk(const Call<C, T>& call, const Rows<C>& of_keys, const Rows<C>& of_values,
                  const Tiles<kTile>& tiles)
      : call_(call), of_keys_(of_keys), of_values_(of_values), tiles_(tiles),
        place_(static_cast<int>(threadIdx.x) / kWarp * kTile) {
    if (place_ >= tiles_.end) return;
    load(of_keys, tiles.at(place_), keys_);
    load<0, kEarly>(of_values, tiles.at(place_), values_);
  }

  // Leaves the warp's softmax in `shared` and in `sums`. Loads are issued as soon as registers are free.
  __device__ void run(int queries, Shared<C, T, kWidth, kHeads>& shared, float* sums) {
    WarpSoftmax<C, kWidth> softmax;
    softmax.start();
    const int query = min(lane_row(), queries - 1);  // lanes without a query repeat the last one
    const float inner = __fmul_rn(call_.logits.inner, kIsFp8<C> ? shared.units[query] : 1.0f);
    while (place_ < tiles_.end) {
      float weights[kTile / 4];
      multiply(shared, query, inner, keys_, weights);
      if constexpr (kEarly < kSteps) load<kEarly, kSteps>(of_values_, tiles_.at(place_), values_);
      const int count = tiles_.at(place_).count;
      place_ += kWarps * kTile;
      const bool is_last = place_ >= tiles_.end;
      const Tile next = tiles_.at(place_);
      if (kEarly == kSteps && !is_last) load(of_keys_, next, keys_);
      const float difference = weigh(softmax, call_.logits.outer, count, weights);
      softmax.multiply(scale_weights(softmax, difference, values_.scales, weights));
      add(softmax, values_, weights);
      if (kEarly < kSteps && !is_last) load(of_keys_, next, keys_);
      if (!is_last) load<0, kEarly>(of_values_, next, values_);
    }
    leave(softmax, queries, shared, sums + static_cast<int>(threadIdx.x) / kWarp * queries * kPartWidth<kWidth>);
  }

 private:
  static constexpr int kSteps = kWidth / 64, kEarly = kWidth == 256 && sizeof(C) == 2 ? 1 : kSteps;

  const Call<C, T>& call_;
  const Rows<C>&of_keys_, &of_values_;
  const Tiles<kTile> tiles_;
  int place_;  // of the warp's tile
  Keys<C, kWidth, kTile> keys_;
  Values<C, kWidth, kTile> values_;
};

}  // namespace jax_fp8::cached_attention
