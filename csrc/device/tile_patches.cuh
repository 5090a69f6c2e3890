// A thread's two patches of a tile of 128 rows x 128 columns: their positions, loads and casts.
#pragma once

#include <cstdint>

#include "by_tile.cuh"
#include "fp8.cuh"
#include "own_slots.cuh"
#include "quantize_tile.cuh"
#include "tile.cuh"
#include "tile_scales.cuh"
#include "vector.cuh"

namespace jax_fp8 {
namespace by_tile {

// ---- where ----------------------------------------------------------------------------------------------------------

// The position of a tile, and of this thread's patches in it: the second lies ValuesTile::kCols columns after the
// first.
struct Place {
  int64_t tile_row, tile_col;
  bool inside[kHalves];

  __device__ static int patch_row() { return static_cast<int>(threadIdx.x) / kGroups * kPatchRows; }
  __device__ static int patch_col() { return static_cast<int>(threadIdx.x) % kGroups * kVectorWidth; }
  __device__ int64_t row() const { return tile_row + patch_row(); }
  __device__ int64_t col(int half) const { return tile_col + patch_col() + half * ValuesTile::kCols; }
};

// For a tile after the last, both patches are outside.
__device__ inline Place place_of(const Task& task, unsigned tile) {
  Place place;
  place.tile_row = int64_t{tile / task.tiles_per_row} * kTile;
  place.tile_col = int64_t{tile % task.tiles_per_row} * kTile;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    place.inside[half] = place.row() < task.results.rows && place.col(half) < task.results.width;
  }
  return place;
}

// ---- loads, ahead of time -------------------------------------------------------------------------------------------

using Slots = OwnSlots<kThreads>;

// Starts the copies of a patch to the thread's slots. A patch outside of the matrix becomes zeros.
template <typename Producer>
__device__ inline void fetch_patch(const Producer& producer, const Task& task, const Place& place, int half,
                                   const Slots& slots) {
  using T = typename Producer::Element;
  const int first = half * kPatchRows * Producer::kInputs;
  if (place.inside[half]) {
#pragma unroll
    for (int i = 0; i < kPatchRows * Producer::kInputs; ++i) {
      const int64_t row = place.row() + i / Producer::kInputs;
      slots.fetch(first + i, producer.address(i % Producer::kInputs, row, place.col(half), task.results.width));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPatchRows * Producer::kInputs; ++i) write_vector(slots.at<T>(first + i), filled_with<T>(0));
  }
}

template <typename T, int kInputs>
__device__ inline void take_patch(const Slots& slots, int half, Vector<T> (&loaded)[kPatchRows][kInputs]) {
#pragma unroll
  for (int i = 0; i < kPatchRows * kInputs; ++i) {
    loaded[i / kInputs][i % kInputs] = read_vector(slots.at<T>(half * kPatchRows * kInputs + i));
  }
}

// ---- loads, and where a companion waits -----------------------------------------------------------------------------
//
// The registers cannot hold two parts, a companion and the inputs in flight. So two inputs of the second patch arrive
// in slots of shared memory. When the thread has taken them, the companion waits for its scales in the same slots.

template <bool kParks, typename Producer, typename T>
__device__ inline void load_patches(const Producer& producer, const Task& task, const Place& place, const Slots& slots,
                                    Patches<T, Producer::kInputs>& loaded) {
  const int64_t width = task.results.width;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    if (!place.inside[half]) continue;
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      if constexpr (kParks) {
#pragma unroll
        for (int input = 0; input < Producer::kInputs; ++input) {
          const T* source = producer.address(input, place.row() + r, place.col(half), width);
          if (half == 1 && input < kHalves) {
            slots.fetch(r * kHalves + input, source);
          } else {
            loaded[half][r][input] = load_vector(source);
          }
        }
      } else {
        producer.load(place.row() + r, place.col(half), width, loaded[half][r]);
      }
    }
  }
}

// The slot in which row r of the companion's patch `half` waits. It is free once the thread has taken the row's inputs.
__device__ constexpr int parking_slot(int half, int r) { return r * kHalves + half; }

// Takes the second patch's inputs from the slots, and stores the first patch's companion there.
template <typename T, int kInputs, int kMade>
__device__ inline void take_and_park(const Slots& slots, Vector<T> (&loaded)[kPatchRows][kInputs],
                                     const Vector<T> (&made)[kPatchRows][kMade], int companion) {
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) loaded[r][i] = read_vector(slots.at<T>(r * kHalves + i));
    write_vector(slots.at<T>(parking_slot(0, r)), made[r][companion]);
  }
}

// ---- casts ----------------------------------------------------------------------------------------------------------

struct PatchCast {
  const float* row_multipliers;     // of the patch's 4 rows, in shared memory
  const float* column_multipliers;  // of its 8 columns, in shared memory
  uint8_t* values;                  // the address of its first row of values
  int64_t stride;                   // elements from a row of values to the next
  bool inside;                      // else nothing is stored
};

// Casts a patch by its rows' multipliers and stores these values, or by its columns' multipliers, or both; each element
// is unpacked once. `left` and `right` return the bytes for the transpose, row by row: those cast by columns if both.
// Adds the elements to the column sums.
template <bool kRows, bool kColumns, typename T, int kMade>
__device__ inline void cast_patch(const Vector<T> (&made)[kPatchRows][kMade], int part, const PatchCast& cast,
                                  uint32_t (&left)[kPatchRows], uint32_t (&right)[kPatchRows],
                                  float (&sums)[kVectorWidth]) {
  float by_row[kPatchRows], by_column[kVectorWidth];
  if (kRows) read_fours(cast.row_multipliers, by_row);
  if (kColumns) read_fours(cast.column_multipliers, by_column);
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
    float elements[kVectorWidth];
    unpack(made[r][part], elements);
    if constexpr (kRows) {
      left[r] = quantize_four<kFormat>(elements, by_row[r]);
      right[r] = quantize_four<kFormat>(elements + 4, by_row[r]);
      if (cast.inside) *reinterpret_cast<uint2*>(cast.values + r * cast.stride) = {left[r], right[r]};
    }
    if constexpr (kColumns) {
      left[r] = quantize_four<kFormat>(elements, by_column);
      right[r] = quantize_four<kFormat>(elements + 4, by_column + 4);
    }
#pragma unroll
    for (int c = 0; c < kVectorWidth; ++c) sums[c] += elements[c];
  }
}

// Casts a patch by its columns' multipliers, the first of which is at `multipliers` in shared memory.
template <typename T>
__device__ inline void cast_columns(const Vector<T> (&made)[kPatchRows], const float* multipliers,
                                    uint32_t (&left)[kPatchRows], uint32_t (&right)[kPatchRows]) {
  float by_column[kVectorWidth];
  read_fours(multipliers, by_column);
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
    float elements[kVectorWidth];
    unpack(made[r], elements);
    left[r] = quantize_four<kFormat>(elements, by_column);
    right[r] = quantize_four<kFormat>(elements + 4, by_column + 4);
  }
}

}  // namespace by_tile
}  // namespace jax_fp8
