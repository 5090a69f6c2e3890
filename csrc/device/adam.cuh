// Adam for a few neighbouring elements of one leaf: load words, convert to float32, update, round, store. The kernels
// in adam.cu and adam_by_tile.cuh choose the elements.
#pragma once

#include <cstdint>

#include "../adam.h"
#include "draws.cuh"
#include "moments.cuh"
#include "reduce.cuh"
#include "words.cuh"

namespace jax_fp8 {

// ---- the arithmetic -------------------------------------------------------------------------------------------------

// What all elements of a leaf share. A thread loads it once.
struct Step {
  float scalars[kAdamScalars];
  float scales[kAdamScales];
  float cast_multiplier, mu_multiplier, nu_multiplier;
  Drawing drawing;
  bool couples_decay;  // Adam with L2 decay in the gradient, not AdamW with decay in the update
};

// `scales` is the leaf's row.
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

// Every operation is rounded on its own: a fused multiply-add would differ from the reference in the last bit.
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

// A remainder above 0x8000 says that the param was rounded up. A master exactly halfway between two bfloat16 has the
// remainder 0x8000, whether it rounds up or down. So a halfway master that rounds up (to even) is moved up by one unit
// in the last place; it rounds to the same bfloat16, and 0x8000 always means rounded down.
__device__ inline float off_the_tie(float p) {
  const uint32_t bits = __float_as_uint(p);
  return __uint_as_float((bits & 0x1FFFFu) == 0x18000u ? bits + 1 : bits);
}

// The master from the bits of a bfloat16 param and the remainder. A remainder above 0x8000 means that the param was
// rounded up, so the master's upper half is one less. If the joined number does not round to the param, or is a NaN,
// somebody has changed the param since: then the param itself is the master.
__device__ inline float join_remainder(uint32_t param, uint32_t low) {
  const uint32_t bits = (param << 16) + low - (low > 0x8000u ? 0x10000u : 0u);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  const bool belongs = (rounded == param) & ((bits & 0x7FFFFFFFu) <= 0x7F800000u);
  return __uint_as_float(belongs ? bits : param << 16);
}

// The remainder of a master is its low 16 bits; the caller ignores the upper bits. The remainder of a NaN is 0.
__device__ inline uint32_t remainder_of(float p) { return p != p ? 0 : __float_as_uint(p); }

// ---- one vector -----------------------------------------------------------------------------------------------------

// kCount neighbours as words from memory. `weight` is the master, or a float32 param; `param` is the 16-bit param of a
// master. With a remainder, `weight` is the bfloat16 param, followed by the remainder from kLow on.
template <int kCount>
struct Words {
  static constexpr int kLow = (kCount + 1) / 2;
  uint32_t g[kCount], mu[kCount], nu[kCount], weight[2 * kLow], param[kLow];
};

__device__ constexpr bool is_half(Storage storage) {
  return storage == Storage::kBFloat16 || storage == Storage::kFloat16;
}

// Whether the leaf has a 16-bit param and a whole master, which must round to that param.
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

// Takes a param as the new master p where p does not round to it: somebody has changed that param. Zeros of either sign
// count as equal, and so do all NaNs.
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

// Stores the master and the param. p becomes the weight that the model uses: the rounded param, or the master if there
// is no param.
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

// Updates kCount neighbours; p becomes the weight that the model uses.
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

// Updates kCount neighbours, and casts them to FP8 with the scale of the leaf. Returns the FP8 bytes in one word.
// Values of a shared cast are not stored here: the caller stores them by patches, since rows there are longer than the
// leaf's.
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
