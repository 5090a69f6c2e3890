// Products of one warp on the tensor cores (mma.sync), which are computed at once.
#pragma GCC optimize("O3")

#include "scheduler.h"
#include "warp.h"

namespace emulation {
namespace {

constexpr int kRows = 16, kColumns = 8, kDepth = 16;

// What a lane gives, as floats: elements of a [16, 16], row by row, and of b [16, 8].
struct Given {
  float a[8], b[4];
};

// Two for each lane, in turns: the other lanes read the one while a fast lane fills the other.
Given given[kMostFibers][2];
bool second[kMostFibers];

// Where an element of a lane lies, by the tables of the PTX ISA for m16n8k16: lanes in groups of four.
struct Element {
  int row, column;
};
Element of_a(int lane, int i) {
  return {lane / 4 + (i < 2 || (i >= 4 && i < 6) ? 0 : 8), lane % 4 * 2 + (i & 1) + (i >= 4 ? 8 : 0)};
}
Element of_b(int lane, int i) { return {lane % 4 * 2 + (i & 1) + (i >= 2 ? 8 : 0), lane / 4}; }
Element of_sums(int lane, int i) { return {lane / 4 + (i < 2 ? 0 : 8), lane % 4 * 2 + (i & 1)}; }

void decode_pairs(Format format, const uint32_t* words, int count, float* out) {
  for (int i = 0; i < 2 * count; ++i) {
    const uint32_t bits = words[i / 2] >> (i % 2 * 16) & 0xFFFF;
    out[i] = format.bias == kBFloat16.bias ? std::bit_cast<float>(bits << 16) : decode(format, bits);
  }
}

}  // namespace

void multiply_in_warp(Format format, float* const (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                      const float (&c)[4], Place place) {
  Given& own = given[current][second[current]];
  second[current] = !second[current];
  decode_pairs(format, a, 4, own.a);
  decode_pairs(format, b, 2, own.b);
  const uint64_t* lanes = warp_exchange("mma", 0xFFFFFFFFu, reinterpret_cast<uint64_t>(&own), place);
  float rows[kRows][kDepth], columns[kColumns][kDepth];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Given& one = *reinterpret_cast<const Given*>(lanes[lane]);
    for (int i = 0; i < 8; ++i) rows[of_a(lane, i).row][of_a(lane, i).column] = one.a[i];
    for (int i = 0; i < 4; ++i) columns[of_b(lane, i).column][of_b(lane, i).row] = one.b[i];
  }
  for (int i = 0; i < 4; ++i) {
    const auto [row, column] = of_sums(emulation_lane(), i);
    float sum = c[i];
    for (int k = 0; k < kDepth; ++k) sum += rows[row][k] * columns[column][k];
    *d[i] = emulation_canonical(sum);
  }
}

}  // namespace emulation
