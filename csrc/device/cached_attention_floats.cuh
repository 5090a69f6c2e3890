// Attention to a cache of float32, for which the tensor cores have no products that are accurate enough.
//
// A lane has eight features of a slot, so kLanes lanes read a slot's key or value at once, and a warp those of
// 32 / kLanes slots. Their products with kHeads queries are kHeads * kSlots sums over the group's lanes. The steps of
// this reduction divide the sums among the lanes: 15 shuffles for 16 sums over 16 lanes, instead of 64. Each lane then
// has a logit of its own and computes one exponential, instead of all of them.
//
//     sum of head h and slot j        h * kSlots + j, in this order on the lanes of a group
//     lanes of one head               kLanes / kHeads neighbours; they share its maximum
#pragma once

#include <cstdint>

#include "cached_attention_call.cuh"
#include "cached_attention_shared.cuh"
#include "exponential.cuh"
#include "reduce.cuh"
#include "vector.cuh"
#include "words.cuh"

namespace jax_fp8::cached_attention {

constexpr int kMostQueriesOfFloats = 4;
constexpr int kSlots = 2;  // that a lane reads at once
constexpr uint32_t kAllLanesOfFloats = 0xFFFFFFFFu;

// Sums over each group of kLanes lanes, divided among them in order: a lane keeps kKept sums, or, of fewer sums than
// lanes, neighbours keep copies of one. Every lane of the warp must call it.
template <int kLanes, int kCount, int kKept>
__device__ inline void divide_sums(const float (&sums)[kCount], float (&kept)[kKept]) {
  if constexpr (kLanes == 1) {
    static_assert(kCount == kKept);
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[i] = sums[i];
  } else if constexpr (kCount == 1) {
    kept[0] = warp_sum<kLanes>(sums[0]);
  } else {
    float half[kCount / 2];
    share_sums(sums, half, kLanes / 2);
    divide_sums<kLanes / 2>(half, kept);
  }
}

// The maximum over the lanes of a group that differ in these distances: `most`, most / 2, ... `least`.
template <int kMost, int kLeast = 1>
__device__ inline float lanes_max(float x) {
#pragma unroll
  for (int distance = kMost; distance >= kLeast; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanesOfFloats, x, distance));
  }
  return x;
}

template <int kMost, int kLeast>
__device__ inline float lanes_sum(float x) {
#pragma unroll
  for (int distance = kMost; distance >= kLeast; distance /= 2) {
    x = __fadd_rn(x, __shfl_xor_sync(kAllLanesOfFloats, x, distance));
  }
  return x;
}

// How the sums of a batch lie on the lanes of a group.
template <int kLanes, int kHeads>
struct Layout {
  static constexpr int kSums = kHeads * kSlots;
  static constexpr int kCopies = kLanes / kSums;
  static constexpr int kHeadLanes = kLanes / kHeads;
  static constexpr int kGroups = kWarp / kLanes;   // of a warp
  static constexpr int kBatch = kGroups * kSlots;  // slots that a warp reads at once
  static_assert(kSums <= kLanes, "a lane has one sum");

  __device__ static int group() { return static_cast<int>(threadIdx.x) % kWarp / kLanes; }
  __device__ static int feature() { return static_cast<int>(threadIdx.x) % kLanes * kVectorWidth; }

  // The slot among its batch of the sum that a lane keeps.
  __device__ static int slot() {
    return static_cast<int>(threadIdx.x) % kLanes / kCopies % kSlots * kGroups + group();
  }
};

// The softmax so far, of the slots that a group has seen.
template <int kLanes, int kHeads>
struct Running {
  float attended[kHeads][kVectorWidth];  // of the lane's features, divided by 2**largest
  float largest;                         // logit, of the lane's head
  float sum;                             // of the weights that the lane computed

  __device__ void start() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kVectorWidth; ++i) attended[h][i] = 0.0f;
    }
    largest = kLowest, sum = 0.0f;
  }

  // Multiplies every head's numbers by the factor that its lanes have.
  __device__ void multiply(float factor) {
    sum = __fmul_rn(sum, factor);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float own = __shfl_sync(kAllLanesOfFloats, factor, h * (kLanes / kHeads), kLanes);
#pragma unroll
      for (int i = 0; i < kVectorWidth; ++i) attended[h][i] = __fmul_rn(attended[h][i], own);
    }
  }
};

template <int kHeads>
__device__ inline float product(const float (&query)[kHeads][kVectorWidth], const float (&key)[kVectorWidth], int h) {
  float sum = __fmul_rn(query[h][0], key[0]);
#pragma unroll
  for (int i = 1; i < kVectorWidth; ++i) sum = __fmaf_rn(query[h][i], key[i], sum);
  return sum;
}

// ---- a batch of slots -----------------------------------------------------------------------------------------------

using FloatBatch = Vector<float>[kSlots];

// What lies outside of the block's slots becomes 0, and is not read.
template <int kLanes, int kHeads>
__device__ inline void load_batch(const Rows<float>& source, const Tile& tile, FloatBatch& batch) {
  using Lanes = Layout<kLanes, kHeads>;
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    const int slot = j * Lanes::kGroups + Lanes::group();
    batch[j] = filled_with<float>(0);
    if (slot < tile.count && Lanes::feature() < source.head_dim) {
      const float* from = source.rows + ((tile.slot + slot) * source.head_dim + Lanes::feature());
      load_words(from, 0, 16, batch[j].words), load_words(from, 16, 16, batch[j].words + 4);
    }
  }
}

// The product of a query and a key that the lane keeps.
template <int kLanes, int kHeads>
__device__ inline float multiply_batch(const float (&query)[kHeads][kVectorWidth], const FloatBatch& keys) {
  float products[kHeads * kSlots], kept[1];
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    float key[kVectorWidth];
    unpack(keys[j], key);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) products[h * kSlots + j] = product(query, key, h);
  }
  divide_sums<kLanes>(products, kept);
  return kept[0];
}

// From a product to a weight, of one of the batch's first `count` slots. Raises the maximum to those of the batch.
template <int kLanes, int kHeads>
__device__ inline float weigh_batch(Running<kLanes, kHeads>& running, const Logits& logits, int count, float product) {
  using Lanes = Layout<kLanes, kHeads>;
  const float logit = Lanes::slot() < count ? logits.of(product) : __int_as_float(0xFF800000);
  const float raised = lanes_max<Lanes::kHeadLanes / 2>(fmaxf(running.largest, logit));
  running.multiply(power_of_2<float>(__fsub_rn(running.largest, raised)));
  running.largest = raised;
  const float weight = power_of_2<float>(__fsub_rn(logit, raised));
  running.sum = __fadd_rn(running.sum, weight);
  return weight;
}

template <int kLanes, int kHeads>
__device__ inline void add_batch(Running<kLanes, kHeads>& running, const FloatBatch& values, float own) {
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    float value[kVectorWidth];
    unpack(values[j], value);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int sum = h * kSlots + j;
      const float weight = __shfl_sync(kAllLanesOfFloats, own, sum * Layout<kLanes, kHeads>::kCopies, kLanes);
#pragma unroll
      for (int i = 0; i < kVectorWidth; ++i) {
        running.attended[h][i] = __fmaf_rn(weight, value[i], running.attended[h][i]);
      }
    }
  }
}

// Combines the softmaxes of the warp's groups, and leaves the warp's in shared memory: `sums` [queries, kPartWidth].
template <int kLanes, int kHeads, typename OfBlock>
__device__ inline void leave_groups(Running<kLanes, kHeads>& running, int queries, OfBlock& shared, float* sums) {
  using Lanes = Layout<kLanes, kHeads>;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const float largest = lanes_max<kWarp / 2, kLanes>(running.largest);
  running.multiply(power_of_2<float>(__fsub_rn(running.largest, largest)));
  const float sum = lanes_sum<Lanes::kHeadLanes / 2, Lanes::kCopies>(lanes_sum<kWarp / 2, kLanes>(running.sum));
  if (lane < kLanes && lane % Lanes::kHeadLanes == 0) {
    shared.largest[warp][lane / Lanes::kHeadLanes] = largest, shared.sums[warp][lane / Lanes::kHeadLanes] = sum;
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int i = 0; i < kVectorWidth; ++i) {
      running.attended[h][i] = lanes_sum<kWarp / 2, kLanes>(running.attended[h][i]);
    }
    if (lane >= kLanes || h >= queries) continue;
    const auto& x = running.attended[h];
    auto* target = reinterpret_cast<float4*>(sums + h * kPartWidth<8 * kLanes> + Lanes::feature());
    target[0] = make_float4(x[0], x[1], x[2], x[3]), target[1] = make_float4(x[4], x[5], x[6], x[7]);
  }
}

// ---- the block's slots ----------------------------------------------------------------------------------------------

// The first batch is loaded before the new token, and the rest follows.
template <int kWidth, int kHeads, int kWarps>
class FloatWalk {
  static constexpr int kLanes = kWidth / kVectorWidth;
  using Lanes = Layout<kLanes, kHeads>;

 public:
  __device__ FloatWalk(const Call<float, float>& call, const Rows<float>& of_keys, const Rows<float>& of_values,
                       const Tiles<Lanes::kBatch>& tiles)
      : call_(call), of_keys_(of_keys), of_values_(of_values), tiles_(tiles),
        place_(static_cast<int>(threadIdx.x) / kWarp * Lanes::kBatch) {
    load_batch<kLanes, kHeads>(of_keys, tiles.at(place_), keys_);
    load_batch<kLanes, kHeads>(of_values, tiles.at(place_), values_);
  }

  __device__ void run(int queries, Shared<float, float, kWidth, kHeads>& shared, float* sums) {
    float query[kHeads][kVectorWidth];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) read_fours(shared.query[0][min(h, queries - 1)] + Lanes::feature(), query[h]);
    Running<kLanes, kHeads> running;
    running.start();
    while (place_ < tiles_.end) {
      const Tile tile = tiles_.at(place_), next = tiles_.at(place_ += kWarps * Lanes::kBatch);
      const float product = multiply_batch<kLanes>(query, keys_);
      load_batch<kLanes, kHeads>(of_keys_, next, keys_);
      const float weight = weigh_batch(running, call_.logits, tile.count, product);
      add_batch(running, values_, weight);
      load_batch<kLanes, kHeads>(of_values_, next, values_);
    }
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    leave_groups(running, queries, shared, sums + warp * queries * kPartWidth<kWidth>);
  }

 private:
  const Call<float, float>& call_;
  const Rows<float>&of_keys_, &of_values_;
  const Tiles<Lanes::kBatch> tiles_;
  int place_;  // of the warp's batch
  FloatBatch keys_, values_;
};

}  // namespace jax_fp8::cached_attention
