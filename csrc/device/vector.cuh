// Vectors: eight neighbouring elements, which a thread loads with 16-byte instructions and converts to floats and back.
//
// bfloat16 and float16 are passed as their bits, so the build needs no CUDA headers for these types.
#pragma once

#include <cstdint>

namespace jax_fp8 {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

constexpr int kVectorWidth = 8;

__device__ inline float to_float(float value) { return value; }

__device__ inline float to_float(BFloat16 value) { return __uint_as_float(uint32_t{value.bits} << 16); }

__device__ inline float to_float(Float16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

// Eight neighbours as they lie in memory. 16-bit elements take half the registers of their floats. A kernel issues all
// its loads as words, and converts when they have arrived.
template <typename T>
struct Vector {
  static constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);
  static constexpr int kWords = kVectorWidth / kPerWord;
  uint32_t words[kWords];
};

template <typename T>
__device__ inline Vector<T> filled_with(uint32_t word) {
  Vector<T> vector;
#pragma unroll
  for (int i = 0; i < Vector<T>::kWords; ++i) vector.words[i] = word;
  return vector;
}

// -0 in every element. Adding it changes no number, not even the sign of a zero.
template <typename T>
constexpr uint32_t kNegativeZeros = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;

// ---- loads and stores, 16 bytes each --------------------------------------------------------------------------------

template <typename T>
__device__ inline uint4 four_words(const Vector<T>& vector, int at) {
  return make_uint4(vector.words[at], vector.words[at + 1], vector.words[at + 2], vector.words[at + 3]);
}

template <typename T>
__device__ inline void put_words(Vector<T>& vector, int at, uint4 four) {
  vector.words[at] = four.x, vector.words[at + 1] = four.y, vector.words[at + 2] = four.z,
  vector.words[at + 3] = four.w;
}

template <typename T>
__device__ inline Vector<T> load_vector(const T* source) {
  Vector<T> vector;
#pragma unroll
  for (int i = 0; i < Vector<T>::kWords; i += 4) {
    put_words(vector, i, __ldg(reinterpret_cast<const uint4*>(source) + i / 4));
  }
  return vector;
}

// From shared memory, or global memory that this kernel also writes; load_vector uses the read-only cache.
template <typename T>
__device__ inline Vector<T> read_vector(const T* source) {
  Vector<T> vector;
#pragma unroll
  for (int i = 0; i < Vector<T>::kWords; i += 4) put_words(vector, i, reinterpret_cast<const uint4*>(source)[i / 4]);
  return vector;
}

// To shared memory.
template <typename T>
__device__ inline void write_vector(T* target, const Vector<T>& vector) {
#pragma unroll
  for (int i = 0; i < Vector<T>::kWords; i += 4) reinterpret_cast<uint4*>(target)[i / 4] = four_words(vector, i);
}

// To global memory. If the words come from asm, the compiler splits an ordinary assignment into four stores; __stcg
// keeps one store of 16 bytes, with the usual cache policy.
template <typename T>
__device__ inline void store_vector(T* target, const Vector<T>& vector) {
#pragma unroll
  for (int i = 0; i < Vector<T>::kWords; i += 4) {
    __stcg(reinterpret_cast<uint4*>(target) + i / 4, four_words(vector, i));
  }
}

// Floats from memory that the block itself has written, four in each 16-byte load.
template <int kCount>
__device__ inline void read_fours(const float* source, float (&out)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 four = reinterpret_cast<const float4*>(source)[i / 4];
    out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
  }
}

// ---- to floats ------------------------------------------------------------------------------------------------------

// Unpacks the elements of one word, the first of two from the low half.
__device__ inline void unpack(uint32_t word, float* out, float) { out[0] = __uint_as_float(word); }

__device__ inline void unpack(uint32_t word, float* out, BFloat16) {
  out[0] = __uint_as_float(word << 16);
  out[1] = __uint_as_float(word & 0xFFFF0000u);
}

__device__ inline void unpack(uint32_t word, float* out, Float16) {
  out[0] = to_float(Float16{static_cast<uint16_t>(word)});
  out[1] = to_float(Float16{static_cast<uint16_t>(word >> 16)});
}

// Unpacks kCount elements from `first` on; kCount is a multiple of the elements of a word.
template <typename T, int kCount>
__device__ inline void unpack(const Vector<T>& vector, float (&out)[kCount], int first = 0) {
  constexpr int kPerWord = Vector<T>::kPerWord;
#pragma unroll
  for (int i = 0; i < kCount; i += kPerWord) unpack(vector.words[(first + i) / kPerWord], out + i, T{});
}

// ---- and back, rounded to nearest even ------------------------------------------------------------------------------

__device__ inline uint32_t pack(float first, float second, BFloat16) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

__device__ inline uint32_t pack(float first, float second, Float16) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

template <typename T>
__device__ inline uint32_t pack(const float* x, T) {
  return pack(x[0], x[1], T{});
}

__device__ inline uint32_t pack(const float* x, float) { return __float_as_uint(x[0]); }

template <typename T, int kCount>
__device__ inline void pack(const float (&x)[kCount], Vector<T>& vector, int first = 0) {
  constexpr int kPerWord = Vector<T>::kPerWord;
#pragma unroll
  for (int i = 0; i < kCount; i += kPerWord) vector.words[(first + i) / kPerWord] = pack(x + i, T{});
}

template <typename T>
__device__ inline T from_float(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    return {static_cast<uint16_t>(pack(x, 0.0f, T{}))};
  }
}

// Rounds floats to T and back.
template <typename T>
__device__ inline void round_all(float (&x)[kVectorWidth]) {
  Vector<T> vector;
  pack(x, vector);
  unpack(vector, x);
}

}  // namespace jax_fp8
