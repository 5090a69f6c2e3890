// Random numbers for the roundings of an optimizer: jax_fp8/kernels/draws.py, bit for bit.
//
// A random number is a hash of a seed, the number of a leaf, and the index of an element in the whole leaf, not in a
// device's shard of it. So the kernels need no state, every block computes its own numbers, and a mesh rounds to the
// same bits as one device.
#pragma once

#include <cstdint>

#include "../adam.h"

namespace jax_fp8 {

// A number of 64 bits from its words in memory, the low one first.
__device__ inline uint64_t from_words(const uint32_t* words) { return __ldg(words) | uint64_t{__ldg(words + 1)} << 32; }

// Odd multipliers that spread the inputs of the hash: low and high word of the index, seed and leaf.
constexpr uint32_t kOfLow = 0x9E3779B1u, kOfHigh = 0x27D4EB2Fu, kOfSeed = 0x85EBCA77u, kOfLeaf = 0xC2B2AE3Du;

// What the random numbers of a leaf share.
struct Drawing {
  const uint32_t* places;  // a parameter of the kernel, which takes no registers
  int gaps;                // the offset of the leaf's gaps in places; -1 if it has none
  uint32_t first;          // low word of the index of this device's first element in the whole leaf
  uint32_t key;            // the hash of that index's high word, the seed and the leaf
};

__device__ inline Drawing drawing_of(const uint32_t* places, int number, uint32_t seed, uint32_t leaf) {
  const uint32_t* place = places + number * kPlaceWords;
  uint64_t gaps = 0;
#pragma unroll
  for (int i = 0; i < kGaps; ++i) gaps |= from_words(place + 4 * i + 4);
  return {
      .places = places,
      .gaps = gaps != 0 ? number * kPlaceWords + 2 : -1,
      .first = __ldg(place),
      .key = __ldg(place + 1) * kOfHigh + seed * kOfSeed + leaf * kOfLeaf,
  };
}

// Mixes the bits of a hash until they look random: the "lowbias32" finalizer.
__device__ inline uint32_t mixed(uint32_t hash) {
  hash ^= hash >> 16;
  hash *= 0x7FEB352Du;
  hash ^= hash >> 15;
  hash *= 0x846CA68Bu;
  return hash ^ hash >> 16;
}

// The part of the hash that depends on an element's index.
__device__ inline uint32_t hash_of(uint64_t index) {
  return static_cast<uint32_t>(index) * kOfLow + static_cast<uint32_t>(index >> 32) * kOfHigh;
}

// Adds to an index the gaps that lie before the element at position `at` of the shard. The number of gaps is `at`
// divided by the length of a block, computed with a multiplier and a shift
// (https://gmplib.org/~tege/divcnst-pldi94.pdf, figure 4.1), since an integer division would be slow.
__device__ inline uint64_t behind_gaps(const uint32_t* gaps, uint32_t at, uint64_t index) {
#pragma unroll 1
  for (int i = 0; i < kGaps; ++i, gaps += 4) {
    const uint32_t shift = __ldg(gaps + 1), product = __umulhi(__ldg(gaps), at);
    const uint32_t blocks = (product + ((at - product) >> min(shift, 1u))) >> (max(shift, 1u) - 1);
    index += blocks * from_words(gaps + 2);
  }
  return index;
}

// Random numbers for kCount neighbours from position `at` of the shard on.
template <int kCount>
__device__ inline void draw(const Drawing& drawing, uint64_t at, uint32_t (&draws)[kCount]) {
  const uint64_t index = drawing.first + at;
#pragma unroll
  for (int i = 0; i < kCount; ++i) draws[i] = hash_of(index + i);
  if (drawing.gaps >= 0) {
    auto place = static_cast<uint32_t>(drawing.gaps);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      draws[i] = hash_of(behind_gaps(drawing.places + place, static_cast<uint32_t>(at) + i, index + i));
      asm volatile("" : "+r"(place));  // not all loads at once: they would need too many registers
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) draws[i] = mixed(draws[i] + drawing.key);
}

// Another random number for the same element.
__device__ inline uint32_t second_draw(uint32_t draw) { return (draw ^ draw >> 15) * 0x2C1B3C6Du; }

}  // namespace jax_fp8
