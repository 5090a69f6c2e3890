// What the kernels that cast by tiles share: their results, and the scale of a tile.
#pragma once

#include <cmath>
#include <cstdint>

#include "../by_tile.h"
#include "../column_sums.h"
#include "fp8.cuh"
#include "tile.cuh"

namespace jax_fp8 {

struct TileCompanion {
  uint8_t* values_t;  // [width, rows]
  float* scales_t;    // [rows / 128, width]
};

// Results that the caller does not need are null.
struct ByTileResults {
  TileCast cast;    // of a matrix [rows, parts * width]
  ColumnSums sums;  // [parts * width], if the producer has kSums
  TileCompanion companion;
  int64_t rows;
  int64_t width;
};

namespace by_tile {

constexpr Fp8Type kFormat = Fp8Type::kE4M3;
static_assert(kTile == kTileRows && kTile == kRowsPerPartialSum);

struct Task {
  ByTileResults results;
  AmaxRule rule;
  int64_t cols;            // parts * width
  unsigned tiles_per_row;  // of the grid of blocks
  unsigned tiles;
};

inline AmaxRule amax_rule_of(const TileRule& rule) {
  return {std::ldexp(1.0f, rule.margin), rule.amax_epsilon, rule.power_2_scale};
}

// Computes the scale of a tile from its amax, stores it, and returns the multiplier for the elements, 1 / scale. The
// tile is that of element (i, j) in a matrix [i_count, j_count] whose rows lie along the contracted dim. A thread whose
// element lies outside of the matrix stores nothing.
__device__ inline float keep_scale(const AmaxRule& rule, float amax, float* scales, bool square, int64_t i, int64_t j,
                                   int64_t i_count, int64_t j_count) {
  const float scale = scale_from_amax<kFormat>(amax, rule);
  const int64_t j_tiles = (j_count + kTile - 1) / kTile;
  if (i < i_count && j < j_count) scales[square ? i / kTile * j_tiles + j / kTile : j / kTile * i_count + i] = scale;
  return multiplier_of(scale);
}

__device__ inline float keep_row_scale(const Task& task, float amax, int64_t row, int64_t col) {
  const TileCast& cast = task.results.cast;
  return keep_scale(task.rule, amax, cast.scales, cast.rule.square, row, col, task.results.rows, task.cols);
}

__device__ inline float keep_column_scale(const Task& task, float amax, int64_t row, int64_t col) {
  const TileCast& cast = task.results.cast;
  return keep_scale(task.rule, amax, cast.scales_t, cast.rule.square_t, col, row, task.cols, task.results.rows);
}

__device__ inline float keep_companion_scale(const Task& task, float amax, int64_t row, int64_t col) {
  const ByTileResults& results = task.results;
  return keep_scale(task.rule, amax, results.companion.scales_t, false, col, row, results.width, results.rows);
}

}  // namespace by_tile
}  // namespace jax_fp8
