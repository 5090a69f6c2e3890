// A tile of 128 rows x 128 columns on its way from rows to columns, through shared memory.
//
// A warp has a row of it, four neighbours a thread: then every access of a warp is of whole 128-byte lines, be the
// elements 4 bytes each or 1, and so is every access to the transpose. A tile is four rounds of 8 x 32 patches, one per
// thread; a patch is 4 rows of 4 columns, so that the 4 bytes of a column make one word of the transpose.
#pragma once

#include <cstdint>

#include "fp8.cuh"

namespace jax_fp8 {

constexpr int kTileThreads = 256;
constexpr int kTileRows = 128;
constexpr int kTileCols = 128;
constexpr int kTileWidth = 4;
constexpr int kPatchRows = 4;
constexpr int kGroups = kTileCols / kTileWidth;
constexpr int kRoundRows = kTileThreads / kGroups * kPatchRows;
constexpr int kRounds = kTileRows / kRoundRows;
constexpr int kWordsPerColumn = kTileRows / kPatchRows;      // 32, one per bank
constexpr int kChunksPerColumn = kTileRows / sizeof(uint4);  // 8 chunks of 16 rows
constexpr int kTileChunks = kTileCols * kChunksPerColumn;
static_assert(kGroups == 32 && kWordsPerColumn == 32,
              "one group of columns for each thread of a warp, one word for each bank");

// Column c of the tile is 8 chunks of 4 words, all columns starting at bank 0. A warp writes the same word of 32 groups
// of columns; word w of group g lives at w ^ g, and the 32 writes meet 32 banks. So a chunk is moved as a whole, to
// chunk ^ (g / 4), and its words change places by g % 4;
// eight threads that read the 8 chunks of one column meet all banks as well.
__device__ inline void put_patch(uint4* tile, int round, const uint32_t (&rows)[kPatchRows]) {
  const int group = threadIdx.x % kGroups;
  const int word = threadIdx.x / kGroups + round * (kTileThreads / kGroups);
  uint32_t columns[kTileWidth];
  transpose_bytes(rows, columns);
  uint32_t* words = reinterpret_cast<uint32_t*>(tile) + group * kTileWidth * kWordsPerColumn + (word ^ group);
#pragma unroll
  for (int c = 0; c < kTileWidth; ++c) words[c * kWordsPerColumn] = columns[c];
}

__device__ inline void store_transpose(const uint4* tile, int64_t tile_row, int64_t tile_col, int64_t rows,
                                       int64_t cols, uint8_t* values_t) {
#pragma unroll
  for (int pass = 0; pass < kTileChunks / kTileThreads; ++pass) {
    const int item = pass * kTileThreads + threadIdx.x;
    const int column = item / kChunksPerColumn;
    const int chunk = item % kChunksPerColumn;
    const int group = column / kTileWidth;
    const int64_t out_row = tile_col + column;
    const int64_t out_col = tile_row + chunk * static_cast<int>(sizeof(uint4));
    if (out_row >= cols || out_col >= rows) continue;
    uint4 bytes = tile[column * kChunksPerColumn + (chunk ^ (group >> 2))];
    if (group & 1) bytes = make_uint4(bytes.y, bytes.x, bytes.w, bytes.z);
    if (group & 2) bytes = make_uint4(bytes.z, bytes.w, bytes.x, bytes.y);
    __stcs(reinterpret_cast<uint4*>(values_t + out_row * rows + out_col), bytes);
  }
}

}  // namespace jax_fp8
