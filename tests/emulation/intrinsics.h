// CUDA's intrinsics: bits, memory, arithmetic.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "fibers.h"

using emulation::Place;

// ---- bits and memory ------------------------------------------------------------------------------------------------

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> (4 * i) & 7) * 8 & 0xFF) << (8 * i);
  return result;
}

#define EMULATION_LOAD(name)                                \
  template <typename T>                                     \
  T name(const T* source, Place place = Place::current()) { \
    return *emulation::aligned(source, place);              \
  }
#define EMULATION_STORE(name)                                                           \
  template <typename T>                                                                 \
  void name(T* target, std::type_identity_t<T> value, Place place = Place::current()) { \
    *emulation::aligned(target, place) = value;                                         \
  }

EMULATION_LOAD(__ldg)
EMULATION_LOAD(__ldca)
EMULATION_LOAD(__ldcg)
EMULATION_LOAD(__ldcs)
EMULATION_STORE(__stcg)
EMULATION_STORE(__stcs)
EMULATION_STORE(__stwt)
#undef EMULATION_LOAD
#undef EMULATION_STORE

template <typename T>
T emulation_exchange(T* target, T value) {
  const T before = *target;
  *target = value;
  return before;
}

template <typename T>
T atomicAdd(T* target, std::type_identity_t<T> value) {
  return emulation_exchange(target, static_cast<T>(*target + value));
}

template <typename T>
T atomicMax(T* target, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  return emulation_exchange(target, std::max(*target, value));
}

template <typename T>
T atomicMin(T* target, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  return emulation_exchange(target, std::min(*target, value));
}

template <typename T>
T atomicExch(T* target, std::type_identity_t<T> value) {
  return emulation_exchange(target, value);
}

// Counts up, and to 0 after `last`, so that a counter of blocks is ready for the next launch.
inline unsigned atomicInc(unsigned* target, unsigned last) {
  return emulation_exchange(target, *target >= last ? 0 : *target + 1);
}

inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- arithmetic -----------------------------------------------------------------------------------------------------

// The only NaN that arithmetic on the device returns.
inline float emulation_canonical(float x) { return x == x ? x : __uint_as_float(0x7FFFFFFFu); }

inline float __fadd_rn(float a, float b) { return emulation_canonical(a + b); }
inline float __fsub_rn(float a, float b) { return emulation_canonical(a - b); }
inline float __fmul_rn(float a, float b) { return emulation_canonical(a * b); }
inline float __fdiv_rn(float a, float b) { return emulation_canonical(a / b); }
inline float __fmaf_rn(float a, float b, float c) { return emulation_canonical(std::fma(a, b, c)); }
inline float __frcp_rn(float x) { return emulation_canonical(1.0f / x); }
inline float __fsqrt_rn(float x) { return emulation_canonical(std::sqrt(x)); }
inline float __frsqrt_rn(float x) {
  return emulation_canonical(static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))));
}

// Of a NaN and a number it is the number, and -0 is less than 0.
inline float emulation_fmaxf(float a, float b) {
  if (a != a || b != b) return emulation_canonical(a != a ? b : a);
  return a > b || (a == b && std::signbit(b)) ? a : b;
}
inline float emulation_fminf(float a, float b) {
  return a != a || b != b ? emulation_fmaxf(a, b) : -emulation_fmaxf(-a, -b);
}
#define fmaxf emulation_fmaxf
#define fminf emulation_fminf

template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_same_v<T, float>) return fmaxf(a, b);
  return static_cast<T>(a) < static_cast<T>(b) ? b : a;
}

template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_same_v<T, float>) return fminf(a, b);
  return static_cast<T>(b) < static_cast<T>(a) ? b : a;
}

// On the device these have errors of a few units in the last place; here they are the host's.
inline float rsqrtf(float x) { return __frsqrt_rn(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return __fdiv_rn(a, b); }
