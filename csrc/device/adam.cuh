// Adam for a few neighbours of one leaf: load words, convert, update, round, store.
// What the elements are is adam.cu's business.
#pragma once

#include <cstdint>

#include "../adam.h"
#include "draws.cuh"
#include "moments.cuh"
#include "reduce.cuh"
#include "words.cuh"

namespace jax_fp8 {

// ---- the arithmetic -------------------------------------------------------------------------------------------------

// What all elements of a leaf share.
struct Step {
  float scalars[kAdamScalars];
  float scales[kAdamScales];
  float cast_multiplier, mu_multiplier, nu_multiplier;
  Drawing drawing;
  bool couples_decay;  // the decay is a part of the gradient, not of the update
};

// The row of `scales` is that of the leaf.
__device__ inline Step step_of(const float* scalars, const float* scales) {
  Step step;
#pragma unroll
  for (int i = 0; i < kAdamScalars; ++i) step.scalars[i] = __ldg(scalars + i);
#pragma unroll
  for (int i = 0; i < kAdamScales; ++i) step.scales[i] = __ldg(scales + i);
  step.cast_multiplier = multiplier_of(step.scales[kCastScale]);
  step.mu_multiplier = multiplier_of(step.scales[kMuScaleAfter]);
  step.nu_multiplier = multiplier_of(step.scales[kNuScaleAfter]);
  return step;
}

// Every operation is rounded by itself: a fused multiply-add would differ from the reference in the last bit.
template <int kCount>
__device__ inline void update(const Step& step, bool decays, float (&g)[kCount], float (&m)[kCount], float (&v)[kCount],
                              float (&p)[kCount]) {
  const auto& s = step.scalars;
  const bool decays_gradient = decays && step.couples_decay, decays_update = decays && !step.couples_decay;
  float u[kCount], squares[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    g[i] = __fmul_rn(g[i], s[kGradScale]);
    if (decays_gradient) g[i] = __fadd_rn(g[i], __fmul_rn(p[i], s[kWeightDecay]));
    m[i] = __fadd_rn(__fmul_rn(s[kB1], m[i]), __fmul_rn(s[kOneMinusB1], g[i]));
    v[i] = __fadd_rn(__fmul_rn(s[kB2], v[i]), __fmul_rn(s[kOneMinusB2], __fmul_rn(g[i], g[i])));
    u[i] = __fmul_rn(m[i], s[kCorrection1]);
    squares[i] = __fmul_rn(v[i], s[kCorrection2]);
  }
  divide_by_roots(u, squares, s[kEps]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (decays_update) u[i] = __fadd_rn(u[i], __fmul_rn(p[i], s[kWeightDecay]));
    p[i] = __fsub_rn(p[i], __fmul_rn(s[kRate], u[i]));
  }
}

// A float32 halfway between two bfloat16 that rounds up is the one case in which the 16 bits below the bfloat16 do not
// tell which of the two it is beside. One unit in the last place further it is; the bfloat16 is the same.
__device__ inline float off_the_tie(float p) {
  const uint32_t bits = __float_as_uint(p);
  return __uint_as_float((bits & 0x1FFFFu) == 0x18000u ? bits + 1 : bits);
}

// Above 0x8000 the param had been rounded up. The param itself where the two do not belong together, since somebody has
// changed the param: no master rounds up to 0, or has more bits than infinity.
__device__ inline float join_remainder(uint32_t param, uint32_t low) {
  const uint32_t bits = (param << 16) + low - (low > 0x8000u ? 0x10000u : 0u);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  const bool belongs = (rounded == param) & ((bits & 0x7FFFFFFFu) <= 0x7F800000u);
  return __uint_as_float(belongs ? bits : param << 16);
}

// What a bfloat16 param lacks of its master in the low 16 bits; what stands above them does not count.
__device__ inline uint32_t remainder_of(float p) { return p != p ? 0 : __float_as_uint(p); }

// ---- one vector -----------------------------------------------------------------------------------------------------

// kCount neighbours as loaded. `weight` is the master, and `param` stands beside it; or `weight` is the param, and from
// kLow on its remainder.
template <int kCount>
struct Words {
  static constexpr int kLow = (kCount + 1) / 2;
  uint32_t g[kCount], mu[kCount], nu[kCount], weight[2 * kLow], param[kLow];
};

__device__ constexpr bool is_half(Storage storage) {
  return storage == Storage::kBFloat16 || storage == Storage::kFloat16;
}

// A master that must round to the param beside it.
__device__ inline bool has_both(const AdamLeaf& leaf) {
  return is_half(leaf.param_storage) && leaf.master_storage != Storage::kRemainder;
}

template <int kCount>
__device__ inline void load(const AdamLeaf& leaf, int64_t index, Words<kCount>& words) {
  const auto load_array = [&](const void* source, Storage storage, uint32_t* out) {
    load_words(source, index * bytes_of(storage), kCount * bytes_of(storage), out);
  };
  load_array(leaf.g, leaf.g_storage, words.g);
  load_array(leaf.mu, leaf.mu_storage, words.mu);
  load_array(leaf.nu, leaf.nu_storage, words.nu);
  if (leaf.master_storage == Storage::kRemainder) {
    load_array(leaf.param, Storage::kBFloat16, words.weight);
    load_array(leaf.master, Storage::kRemainder, words.weight + Words<kCount>::kLow);
  } else if (leaf.master_storage == Storage::kFloat16) {
    load_array(leaf.master, Storage::kFloat16, words.weight);
  } else {
    load_array(leaf.master == nullptr ? leaf.param : leaf.master, Storage::kFloat32, words.weight);
  }
  if (has_both(leaf)) load_array(leaf.param, leaf.param_storage, words.param);
}

// Masters p beside params that are not p, rounded: somebody has changed these params, so they are the masters. One zero
// is as good as the other, and so is one NaN.
template <int kCount>
__device__ inline void take_params(Storage storage, const uint32_t* rounded, const uint32_t* params,
                                   float (&p)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t ours = half_of(rounded, i), theirs = half_of(params, i);
    const float param = from_half(storage, static_cast<uint16_t>(theirs));
    const bool zeros = ((ours | theirs) & 0x7FFFu) == 0, no_numbers = (p[i] != p[i]) & (param != param);
    if (ours != theirs && !zeros && !no_numbers) p[i] = param;
  }
}

template <int kCount>
__device__ inline void unpack_weight(const AdamLeaf& leaf, const Words<kCount>& words, float (&p)[kCount]) {
  if (leaf.master_storage == Storage::kRemainder) {
    const uint32_t* low = words.weight + Words<kCount>::kLow;
#pragma unroll
    for (int i = 0; i < kCount; ++i) p[i] = join_remainder(half_of(words.weight, i), half_of(low, i));
    return;
  }
  unpack_words(leaf.master_storage == Storage::kFloat16 ? Storage::kFloat16 : Storage::kFloat32, words.weight, p);
  if (!has_both(leaf)) return;
  uint32_t rounded[Words<kCount>::kLow];
  pack_floats(leaf.param_storage, p, rounded);
  bool same = true;
#pragma unroll
  for (int i = 0; i < Words<kCount>::kLow; ++i) same = same & (rounded[i] == words.param[i]);
  if (!likely(same)) take_params(leaf.param_storage, rounded, words.param, p);
}

// Stores the master and the param; p becomes the weight that the model sees: the param,
// or the master where that is all there is.
template <int kCount>
__device__ inline void store_weight(const AdamLeaf& leaf, int64_t index, float (&p)[kCount]) {
  uint32_t words[kCount];
  const auto store_array = [&](void* target, Storage storage) {
    store_words(target, index * bytes_of(storage), kCount * bytes_of(storage), words);
  };
  const Storage master = leaf.master_storage, param = leaf.param_storage;
  if (param == Storage::kBFloat16 && master != Storage::kFloat16) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) p[i] = off_the_tie(p[i]);
  }
  if (master == Storage::kRemainder) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      words[i / 2] = __byte_perm(remainder_of(p[i]), i + 1 < kCount ? remainder_of(p[i + 1]) : 0, 0x5410);
    }
    store_array(leaf.master, master);
  } else if (master != Storage::kNone) {
    pack_floats(master, p, words);
    store_array(leaf.master, master);
    if (master == Storage::kFloat16) unpack_words(master, words, p);
  }
  if (param != Storage::kNone) {
    pack_floats(param, p, words);
    store_array(leaf.param, param);
    if (param != Storage::kFloat32) unpack_words(param, words, p);
  }
}

// Updates kCount neighbours; p becomes the weight that the model sees.
template <int kCount>
__device__ inline void renew(const AdamLeaf& leaf, const Step& step, int64_t index, Words<kCount>& words,
                             float (&p)[kCount]) {
  float g[kCount], m[kCount], v[kCount];
  unpack_words(leaf.g_storage, words.g, g);
  unpack_words(leaf.mu_storage, words.mu, m);
  unpack_words(leaf.nu_storage, words.nu, v);
  unpack_weight(leaf, words, p);
  const bool scaled_mu = is_fp8(leaf.mu_storage), scaled_root = is_fp8(leaf.nu_storage);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (scaled_mu) m[i] = __fmul_rn(m[i], step.scales[kMuScaleBefore]);
    if (scaled_root) v[i] = __fmul_rn(v[i], step.scales[kNuScaleBefore]);
    if (scaled_root) v[i] = __fmul_rn(v[i], v[i]);
  }
  update(step, leaf.decays, g, m, v, p);
  uint32_t draws[kCount];
  if (leaf.mu_storage != Storage::kFloat32 || leaf.nu_storage != Storage::kFloat32) draw(step.drawing, index, draws);
  pack_mu(step.mu_multiplier, leaf.mu_storage, m, draws, words.mu);
  pack_nu(step.nu_multiplier, leaf.nu_storage, v, draws, words.nu);
  store_words(leaf.mu, index * bytes_of(leaf.mu_storage), kCount * bytes_of(leaf.mu_storage), words.mu);
  store_words(leaf.nu, index * bytes_of(leaf.nu_storage), kCount * bytes_of(leaf.nu_storage), words.nu);
  store_weight(leaf, index, p);
}

// The same, and their FP8 values with the scale of the leaf, which it returns. Into a shared cast they are stored by
// patches.
template <int kCount>
__device__ inline uint32_t update(const AdamLeaf& leaf, const Step& step, int64_t index, Words<kCount>& words,
                                  float& amax) {
  float p[kCount];
  renew(leaf, step, index, words, p);
  if (leaf.values == nullptr) return 0;
  amax = amax_of(amax, p);
  const uint32_t bytes = quantize(leaf.values_storage, p, step.cast_multiplier);
  if (leaf.values_stride == 0) store_words(leaf.values, index, kCount, &bytes);
  return bytes;
}

}  // namespace jax_fp8
