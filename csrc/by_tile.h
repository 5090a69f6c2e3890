// A cast by tiles of 128: the shape of a tile, the rule from its amax to its scale, and the arrays of the result.
//
// A tile has one scale. A GEMM contracts 128 elements at a time and multiplies each such partial sum by the scales of
// its tiles. So a tile must lie along the contracted dim: the rowwise values have tiles of 1 x 128 along a row, and the
// columnwise values have tiles of 1 x 128 along a column, with scales of their own. Square tiles of 128 x 128 serve
// both orientations. Tiles at the edge of the matrix are cut. All values are E4M3.
#pragma once

#include <cstdint>

namespace jax_fp8 {

constexpr int kTile = 128;

// Attributes of each operation that casts by tiles.
struct TileRule {
  bool square;    // whether a tile of the rowwise values is 128 x 128; else it is 1 x 128
  bool square_t;  // the same for the columnwise values
  int32_t margin;      // powers of two of headroom
  float amax_epsilon;  // smallest amax
  bool power_2_scale;  // whether scales are rounded up to a power of two
};

// The cast of a matrix [rows, cols]. Results that the caller does not need are null. Lengths in tiles are rounded up.
struct TileCast {
  TileRule rule;
  uint8_t* values;    // [rows, cols]
  uint8_t* values_t;  // [cols, rows]
  float* amax;        // of the matrix
  float* scales;      // of values: [cols / 128, rows], as GEMMs read them; square tiles: [rows / 128, cols / 128]
  float* scales_t;    // of values_t: [rows / 128, cols]; square tiles: [cols / 128, rows / 128]
};

}  // namespace jax_fp8
