// Neighbouring elements as words as they lie in memory, for arrays whose storage is known only at run time but is the
// same for a whole block.
//
// A kernel issues all its loads as words, and converts when they have arrived. A conversion between the loads would
// wait for its operand, and the thread would issue no further loads meanwhile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../dtypes.h"
#include "fp8.cuh"
#include "vector.cuh"

namespace jax_fp8 {

__device__ constexpr bool is_fp8(Storage storage) { return storage == Storage::kE4M3 || storage == Storage::kE5M2; }

__device__ constexpr int bytes_of(Storage storage) {
  return storage == Storage::kFloat32 ? 4 : is_fp8(storage) ? 1 : 2;
}

// Loads data that is touched once, with the streaming cache policy: it should not evict other data from L2. `bytes` is
// 16, 8, 4, 2 or 1, the same for the whole block.
__device__ inline void load_words(const void* source, int64_t offset, int bytes, uint32_t* words) {
  const char* address = static_cast<const char*>(source) + offset;
  if (bytes == 16) {
    const uint4 loaded = __ldcs(reinterpret_cast<const uint4*>(address));
    words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
  } else if (bytes == 8) {
    const uint2 loaded = __ldcs(reinterpret_cast<const uint2*>(address));
    words[0] = loaded.x, words[1] = loaded.y;
  } else if (bytes == 4) {
    words[0] = __ldcs(reinterpret_cast<const uint32_t*>(address));
  } else if (bytes == 2) {
    words[0] = __ldcs(reinterpret_cast<const uint16_t*>(address));
  } else {
    words[0] = __ldcs(reinterpret_cast<const uint8_t*>(address));
  }
}

__device__ inline void store_words(void* target, int64_t offset, int bytes, const uint32_t* words) {
  char* address = static_cast<char*>(target) + offset;
  if (bytes == 16) {
    __stcs(reinterpret_cast<uint4*>(address), make_uint4(words[0], words[1], words[2], words[3]));
  } else if (bytes == 8) {
    __stcs(reinterpret_cast<uint2*>(address), make_uint2(words[0], words[1]));
  } else if (bytes == 4) {
    __stcs(reinterpret_cast<uint32_t*>(address), words[0]);
  } else if (bytes == 2) {
    __stcs(reinterpret_cast<uint16_t*>(address), static_cast<uint16_t>(words[0]));
  } else {
    __stcs(reinterpret_cast<uint8_t*>(address), static_cast<uint8_t>(words[0]));
  }
}

// Element i of an array of 16-bit elements.
__device__ inline uint16_t half_of(const uint32_t* words, int i) {
  return static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
}

// Replaces NaNs in a word of two bfloat16. The hardware's conversion makes every NaN 0x7FFF. The reference keeps the
// sign and returns the quiet NaN 0x7FC0.
__device__ inline uint32_t nan_pair(uint32_t word, float first, float second) {
  if (first != first) word = (word & 0xFFFF0000u) | (__float_as_uint(first) >> 16 & 0x8000u) | 0x7FC0u;
  if (second != second) word = (word & 0xFFFFu) | (__float_as_uint(second) & 0x80000000u) | 0x7FC00000u;
  return word;
}

template <typename T, int kCount>
__device__ inline void pack_halves(const float (&x)[kCount], uint32_t* words) {
  const auto second_of = [&](int i) { return i + 1 < kCount ? x[i + 1] : 0.0f; };
  bool numbers = true;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    words[i / 2] = pack(x[i], second_of(i), T{});
    numbers = numbers & (x[i] == x[i]) & (second_of(i) == second_of(i));
  }
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (__builtin_expect(numbers, true)) return;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) words[i / 2] = nan_pair(words[i / 2], x[i], second_of(i));
  }
}

// Stochastic rounding to bfloat16: adds the upper 16 bits of the random number to the float's bits, then drops the low
// 16 bits. So the magnitude rounds up with a probability equal to the dropped fraction. Infinities stay, and a number
// above the largest bfloat16 becomes that. With kNeverZero, a positive number stays positive.
template <bool kNeverZero, int kCount>
__device__ inline void pack_at_random(const float (&x)[kCount], const uint32_t (&draws)[kCount], uint32_t* words) {
  uint32_t bits[kCount];
  bool numbers = true;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    bits[i] = __float_as_uint(x[i]);
    const bool stays = (bits[i] & 0x7FFFFFFFu) >= 0x7F7F0000u, is_zero = bits[i] == 0;
    bits[i] += stays ? 0 : draws[i] >> 16;
    if (kNeverZero && !is_zero) bits[i] = max(bits[i], 0x10000u);
    numbers = numbers & (x[i] == x[i]);
  }
  const auto at = [&](const auto& values, int i) { return i < kCount ? values[i] : 0; };
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    words[i / 2] = __byte_perm(bits[i], at(bits, i + 1), 0x7632);
  }
  if (__builtin_expect(numbers, true)) return;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) words[i / 2] = nan_pair(words[i / 2], x[i], at(x, i + 1));
}

__device__ inline float from_half(Storage storage, uint16_t bits) {
  return storage == Storage::kBFloat16 ? to_float(BFloat16{bits}) : to_float(Float16{bits});
}

// ---- kCount elements as floats, and back; kCount is 4, or 1 at the end of an array ----------------------------------

template <Fp8Type kFormat, int kCount>
__device__ inline void unpack_fp8(uint32_t word, float (&out)[kCount]) {
  float discarded;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    uncast_pair<kFormat>(static_cast<uint16_t>(word >> (i * 8)), out[i], i + 1 < kCount ? out[i + 1] : discarded);
  }
}

template <int kCount>
__device__ inline void unpack_words(Storage storage, const uint32_t* words, float (&out)[kCount]) {
  if (storage == Storage::kE4M3) return unpack_fp8<Fp8Type::kE4M3>(words[0], out);
  if (storage == Storage::kE5M2) return unpack_fp8<Fp8Type::kE5M2>(words[0], out);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    out[i] = storage == Storage::kFloat32 ? __uint_as_float(words[i]) : from_half(storage, half_of(words, i));
  }
}

// Casts floats that are already scaled to FP8.
template <Fp8Type kFormat, int kCount>
__device__ inline uint32_t pack_fp8(const float (&x)[kCount]) {
  if constexpr (kCount == 1) return cast_pair<kFormat>(x[0], 0.0f) & 0xFFu;
  if constexpr (kCount == 4) return cast_pair<kFormat>(x[0], x[1]) | cast_pair<kFormat>(x[2], x[3]) << 16;
}

template <int kCount>
__device__ inline uint32_t quantize(Storage format, const float (&x)[kCount], float multiplier) {
  float scaled[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) scaled[i] = __fmul_rn(x[i], multiplier);
  return format == Storage::kE4M3 ? pack_fp8<Fp8Type::kE4M3>(scaled) : pack_fp8<Fp8Type::kE5M2>(scaled);
}

template <int kCount>
__device__ inline void pack_floats(Storage storage, const float (&x)[kCount], uint32_t* words) {
  if (storage == Storage::kFloat32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = __float_as_uint(x[i]);
  } else if (storage == Storage::kBFloat16) {
    pack_halves<BFloat16>(x, words);
  } else {
    pack_halves<Float16>(x, words);
  }
}

}  // namespace jax_fp8
