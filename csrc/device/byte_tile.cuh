// Tiles of 128 x 128 bytes, which a block reads by rows and writes to a transpose. A thread has a patch of 4 rows x 16
// columns: it moves 16 bytes at a time, and eight neighbouring threads a whole line of 128 bytes.
#pragma once

#include <cstdint>

#include "fp8.cuh"
#include "tile.cuh"

namespace jax_fp8 {

constexpr int kByteTileThreads = 256;
constexpr int kBytesAtOnce = sizeof(uint4);
constexpr int kByteGroups = 8;
using ByteTile = Tile<kBytesAtOnce, kByteGroups>;
static_assert(kByteTileThreads == kByteGroups * ByteTile::kColumnWords);

// Where this block's tile and this thread's patch begin in the matrix.
struct BytePatch {
  int64_t tile_row, tile_col, row, col;
  int group, number;

  __device__ explicit BytePatch(unsigned tiles_per_row)
      : tile_row(int64_t{blockIdx.x / tiles_per_row} * kTileRows),
        tile_col(int64_t{blockIdx.x % tiles_per_row} * ByteTile::kCols),
        group(static_cast<int>(threadIdx.x) % kByteGroups),
        number(static_cast<int>(threadIdx.x) / kByteGroups) {
    row = tile_row + number * kPatchRows, col = tile_col + group * kBytesAtOnce;
  }

  // Leaves the patch in the tile.
  __device__ void put(uint4* tile, const uint4 (&rows)[kPatchRows]) const {
    uint32_t columns[4][4];
    transpose_bytes({rows[0].x, rows[1].x, rows[2].x, rows[3].x}, columns[0]);
    transpose_bytes({rows[0].y, rows[1].y, rows[2].y, rows[3].y}, columns[1]);
    transpose_bytes({rows[0].z, rows[1].z, rows[2].z, rows[3].z}, columns[2]);
    transpose_bytes({rows[0].w, rows[1].w, rows[2].w, rows[3].w}, columns[3]);
    ByteTile::put(tile, number, group, columns);
  }
};

}  // namespace jax_fp8
