// The cast by tiles for any shape, one element at a time. The producer makes every element twice: first for the scales,
// then for the values.
//
// A block has 128 rows and 128 columns. Columns count over all parts side by side, so a tile may have columns of two
// parts. The companion has the columns of the first part.
#pragma once

#include <cstdint>

#include "by_tile.cuh"
#include "fp8.cuh"
#include "reduce.cuh"

namespace jax_fp8 {
namespace by_tile {

constexpr int kAnyThreads = 256;
constexpr int kRowsAtOnce = kAnyThreads / kTile;  // 2 rows; a thread has one column of every second row

// A column of the parts side by side: which part it is in, and its index there.
template <typename Producer>
struct Column {
  static constexpr int kMade = Producer::kParts + Producer::kCompanions;
  int64_t part, col;  // col counts within the part
  int64_t width;

  // The element of this column in a row, and the companion's.
  __device__ void make(const Producer& producer, int64_t row, float& element, float& companion) const {
    float made[kMade];
    producer.element(row, col, width, made);
    element = Producer::kParts == 2 && part == 1 ? made[Producer::kParts - 1] : made[0];
    companion = made[kMade - 1];
  }
};

}  // namespace by_tile

template <typename Producer>
__global__ void __launch_bounds__(by_tile::kAnyThreads) quantize_any_by_tile_kernel(Producer producer,
                                                                                    by_tile::Task task) {
  using namespace by_tile;
  __shared__ uint32_t row_maxima[kTile];
  __shared__ uint32_t column_maxima[kTile];
  __shared__ uint32_t companion_maxima[kTile];
  __shared__ uint32_t tile_maximum[1];
  __shared__ float row_multipliers[kTile];
  __shared__ float sums[kRowsAtOnce][kTile];
  __shared__ uint8_t tile[kTile][kTile + 4];  // the padding of 4 bytes shifts each row by one bank
  __shared__ uint8_t companion_tile[Producer::kCompanions ? kTile : 1][kTile + 4];
  const ByTileResults& results = task.results;
  const TileCast& cast = results.cast;
  const int64_t rows = results.rows;
  const int64_t tile_row = int64_t{blockIdx.x / task.tiles_per_row} * kTile;
  const int64_t tile_col = int64_t{blockIdx.x % task.tiles_per_row} * kTile;
  const int c = threadIdx.x % kTile, first = threadIdx.x / kTile;
  const int64_t col = tile_col + c;
  const Column<Producer> column{col / results.width, col % results.width, results.width};
  const bool is_inside = col < task.cols, has_companion = Producer::kCompanions && col < results.width;
  if (first == 0) row_maxima[c] = column_maxima[c] = companion_maxima[c] = tile_maximum[0] = 0;
  __syncthreads();

  const auto as_bits = [](float x) { return __float_as_uint(fmaxf(0.0f, fabsf(x))); };  // a NaN counts as 0
  float thread_amax = 0.0f, sum = 0.0f;
  for (int r = first; r < kTile && tile_row + r < rows; r += kRowsAtOnce) {
    float element = 0.0f, companion = 0.0f;
    if (is_inside) column.make(producer, tile_row + r, element, companion);
    thread_amax = amax_of(thread_amax, element);
    sum += element;
    const uint32_t of_warp = __reduce_max_sync(0xFFFFFFFFu, as_bits(element));
    if (c % kWarp == 0) atomicMax(&row_maxima[r], of_warp), atomicMax(&tile_maximum[0], of_warp);
    atomicMax(&column_maxima[c], as_bits(element));
    if (has_companion) atomicMax(&companion_maxima[c], as_bits(companion));
  }
  if constexpr (Producer::kSums) sums[first][c] = sum;
  merge_amax<kAnyThreads>(thread_amax, cast.amax);  // contains a barrier

  const auto amax_from = [&](bool square, uint32_t maximum) {
    return __uint_as_float(square ? tile_maximum[0] : maximum);
  };
  float multiplier_t = 1.0f, companion_multiplier = 1.0f;
  if (cast.values && first == 0) {
    row_multipliers[c] = keep_row_scale(task, amax_from(cast.rule.square, row_maxima[c]), tile_row + c, tile_col);
  }
  if (cast.values_t) {
    multiplier_t = keep_column_scale(task, amax_from(cast.rule.square_t, column_maxima[c]), tile_row, col);
  }
  if constexpr (Producer::kCompanions) {
    companion_multiplier = keep_companion_scale(task, __uint_as_float(companion_maxima[c]), tile_row, col);
  }
  if (Producer::kSums && first == 0 && is_inside) {
    results.sums.partial[tile_row / kTile * task.cols + col] = sums[0][c] + sums[1][c];
  }
  __syncthreads();

  for (int r = first; r < kTile && tile_row + r < rows && is_inside; r += kRowsAtOnce) {
    float element, companion;
    column.make(producer, tile_row + r, element, companion);
    if (cast.values) cast.values[(tile_row + r) * task.cols + col] = quantize_one<kFormat>(element, row_multipliers[r]);
    tile[r][c] = quantize_one<kFormat>(element, multiplier_t);
    if constexpr (Producer::kCompanions) {
      companion_tile[r][c] = quantize_one<kFormat>(companion, companion_multiplier);
    }
  }
  __syncthreads();

  const auto store = [&](const auto& bytes, int64_t out_rows, uint8_t* values_t) {
    for (int out = first; out < kTile; out += kRowsAtOnce) {
      const int64_t out_row = tile_col + out, out_col = tile_row + c;
      if (out_row < out_rows && out_col < rows) values_t[out_row * rows + out_col] = bytes[c][out];
    }
  };
  if (cast.values_t) store(tile, task.cols, cast.values_t);
  if constexpr (Producer::kCompanions) store(companion_tile, results.width, results.companion.values_t);
}

}  // namespace jax_fp8
