// A cast by tiles of 128: what a tile is, how its scale follows from its amax, and where all of it goes.
//
// A tile has one scale, and a GEMM multiplies with the scale of each stretch of 128 that it contracts. So the rowwise
// values have tiles of 1 x 128 along a row, and the columnwise values tiles of 1 x 128 along a column, with scales of
// their own; or both have square tiles. Tiles at the edge are cut. All values are E4M3.
#pragma once

#include <cstdint>

namespace jax_fp8 {

constexpr int kTile = 128;

// Attributes of each operation that casts by tiles.
struct TileRule {
  bool square;    // whether a tile of the rowwise values is 128 x 128, or 1 x 128
  bool square_t;  // the same of the columnwise values
  int32_t margin;      // powers of two of headroom
  float amax_epsilon;  // smallest amax
  bool power_2_scale;  // rounded up to a power of two
};

// Of a matrix [rows, cols]. What is not wanted is null. Lengths in tiles are rounded up.
struct TileCast {
  TileRule rule;
  uint8_t* values;    // [rows, cols]
  uint8_t* values_t;  // [cols, rows]
  float* amax;        // of the matrix
  float* scales;      // of values: [cols / 128, rows], which GEMMs read; [rows / 128, cols / 128] of square tiles
  float* scales_t;    // of values_t: [rows / 128, cols]; [cols / 128, rows / 128] of square tiles
};

}  // namespace jax_fp8
