// The transpose of a tile of bytes by way of shared memory. A tile has 128 rows, or 64, and kGroups groups of kWidth
// neighbouring columns.
//
// A thread brings patches of 4 rows of one group: the 4 bytes of a column make one word of the transpose. A column of
// 128 rows leaves as 8 chunks of 16 bytes, which 8 neighbouring threads store as a whole line of 128 bytes; a column of
// 64 rows as half a line. The width of a patch depends on how many elements a thread loads at once.
#pragma once

#include <cstdint>

#include "fp8.cuh"
#include "reduce.cuh"

namespace jax_fp8 {

constexpr int kTileRows = 128;
constexpr int kPatchRows = 4;

// Whether a result should stay in L2 because the next kernel reads it (kUsual), or leave first because no kernel reads
// it soon (kTouchedOnce).
enum class CachePolicy { kUsual, kTouchedOnce };

// The swizzle that avoids bank conflicts. The words of every group start at bank 0, and a warp writes kTogether
// neighbouring words of each group at once. Word w of group g is stored at w ^ (g * kTogether), so that these 32 writes
// fall into 32 banks. With kTogether = 4 this moves chunks of 4 words as a whole; with less it permutes the words
// within a chunk too, and the reader undoes that. Eight threads that read neighbouring chunks, of one column of 128
// rows or of two columns of 64, also access every bank once.
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

  // Stores the columns of a patch, in fours as transpose_bytes returns them.
  static __device__ inline void put(uint4* tile, int patch, int group, const uint32_t (&columns)[kWidth / 4][4]) {
    uint32_t* words = reinterpret_cast<uint32_t*>(tile) + group * kWidth * kColumnWords;
    const int bank = patch ^ (group * kTogether);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      const int word = c * kColumnWords;  // the first of the column
      words[word / kWarp * kWarp + (bank ^ word % kWarp)] = columns[c / 4][c % 4];
    }
  }

  // Writes the tile at (tile_row, tile_col) of a matrix (rows, cols), both multiples of 16, to the matrix's transpose.
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
