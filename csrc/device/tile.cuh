// A tile of bytes on its way from rows to columns, through shared memory: 128 rows, or 64, of kGroups groups of kWidth
// neighbouring columns.
//
// A thread brings patches, 4 rows of one group: the 4 bytes of a column make one word of the transpose. A column leaves
// as 8 chunks of 16 bytes, which 8 neighbouring threads store as a whole line of 128; of 64 rows, half of one. All
// kernels that transpose by blocks of so many rows have such a tile; how wide a patch is follows from the elements that
// it is made of.
#pragma once

#include <cstdint>

#include "fp8.cuh"
#include "reduce.cuh"

namespace jax_fp8 {

constexpr int kTileRows = 128;
constexpr int kPatchRows = 4;

// Whether a result should push other things out of L2: the next kernel reads it, or nobody for long.
enum class CachePolicy { kUsual, kTouchedOnce };

// The words of a group start at bank 0. A warp writes kTogether neighbouring words of each group; word w of group g
// lives at w ^ (g * kTogether), and the 32 writes meet 32 banks. So a chunk is moved as a whole, and where kTogether is
// less than its 4 words, these change places too. Eight threads that read neighbouring chunks, of one column of 128
// rows or of two of 64, meet all banks as well.
template <int kWidth, int kGroups, int kRows = kTileRows>
struct Tile {
  static constexpr int kCols = kWidth * kGroups;
  static constexpr int kColumnWords = kRows / kPatchRows;
  static constexpr int kColumnChunks = kRows / static_cast<int>(sizeof(uint4));
  static constexpr int kChunks = kCols * kColumnChunks;
  static constexpr int kTogether = kWarp / kGroups;
  static constexpr int kWithin = kTogether == 4 ? 0 : 2;  // how many bits of g move words within a chunk
  static_assert(kGroups == 8 || kGroups == 32, "a warp writes one word to each bank");
  static_assert(kColumnWords == kWarp || (kColumnWords == kWarp / 2 && kTogether == 1),
                "one or two columns fill the banks");

  // The columns of a patch, four and four, as transpose_bytes makes them.
  static __device__ inline void put(uint4* tile, int patch, int group, const uint32_t (&columns)[kWidth / 4][4]) {
    uint32_t* words = reinterpret_cast<uint32_t*>(tile) + group * kWidth * kColumnWords;
    const int bank = patch ^ (group * kTogether);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      const int word = c * kColumnWords;  // the first of the column
      words[word / kWarp * kWarp + (bank ^ word % kWarp)] = columns[c / 4][c % 4];
    }
  }

  // To the transpose of a matrix (rows, cols), multiples of 16, of which this is the tile at (tile_row, tile_col).
  template <int kThreads, CachePolicy kPolicy = CachePolicy::kUsual>
  static __device__ inline void store(const uint4* tile, int64_t tile_row, int64_t tile_col, int64_t rows, int64_t cols,
                                      uint8_t* transpose) {
    static_assert(kThreads % kColumnChunks == 0);
    constexpr int kAtOnce = kThreads / kColumnChunks;
    const int first = static_cast<int>(threadIdx.x) / kColumnChunks;
    const int chunk = static_cast<int>(threadIdx.x) % kColumnChunks;
    const int64_t out_col = tile_row + chunk * static_cast<int>(sizeof(uint4));
    if (out_col >= rows) return;
    const int64_t wanted = cols - tile_col;
    uint8_t* target_byte = transpose + (tile_col + first) * rows + out_col;
#pragma unroll
    for (int pass = 0; pass < kCols / kAtOnce; ++pass, target_byte += kAtOnce * rows) {
      const int column = pass * kAtOnce + first, group = column / kWidth;
      if (column < wanted) {
        uint4 bytes = tile[(column * kColumnChunks + chunk) ^ (group >> kWithin)];
        if constexpr (kWithin == 2) {
          if (group & 1) bytes = make_uint4(bytes.y, bytes.x, bytes.w, bytes.z);
          if (group & 2) bytes = make_uint4(bytes.z, bytes.w, bytes.x, bytes.y);
        }
        uint4* target = reinterpret_cast<uint4*>(target_byte);
        if constexpr (kPolicy == CachePolicy::kTouchedOnce) {
          __stcs(target, bytes);
        } else {
          *target = bytes;
        }
      }
    }
  }
};

}  // namespace jax_fp8
