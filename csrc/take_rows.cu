// The kernel reads a row of x once for each row that it fills, mostly from L2, and writes every byte once, in tiles of
// 128 x 128, as csrc/transpose.cu does.
#include "device/tile.cuh"
#include "launch.h"
#include "take_rows.h"

namespace jax_fp8 {
namespace {

constexpr int kThreads = 256;  // one patch of 4 rows x 16 columns each
constexpr int kWidth = sizeof(uint4);
constexpr int kGroups = 8;
using ByteTile = Tile<kWidth, kGroups>;
static_assert(kThreads == kGroups * ByteTile::kColumnWords);
constexpr int kBlocks = 8;  // on a multiprocessor, so that many loads are under way

__device__ inline uint4 load_row(const TakeRowsArguments& arguments, int64_t row, int64_t col) {
  const int32_t source = row < arguments.rows ? __ldg(arguments.sources + row) : -1;
  if (source < 0 || source >= arguments.of_x) return make_uint4(0, 0, 0, 0);
  return __ldg(reinterpret_cast<const uint4*>(arguments.x + source * arguments.cols + col));
}

template <bool kTransposes>
__global__ void __launch_bounds__(kThreads, kBlocks)
    take_rows_transpose_kernel(const TakeRowsArguments arguments, unsigned tiles_per_row) {
  const int64_t tile_row = int64_t{blockIdx.x / tiles_per_row} * kTileRows;
  const int64_t tile_col = int64_t{blockIdx.x % tiles_per_row} * ByteTile::kCols;
  const int group = threadIdx.x % kGroups;
  const int patch = threadIdx.x / kGroups;
  const int64_t row = tile_row + patch * kPatchRows;
  const int64_t col = tile_col + group * kWidth;
  uint4 loaded[kPatchRows];
  if (row < arguments.rows && col < arguments.cols) {
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) loaded[r] = load_row(arguments, row + r, col);
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      if (row + r >= arguments.rows) break;
      *reinterpret_cast<uint4*>(arguments.taken + (row + r) * arguments.cols + col) = loaded[r];
    }
  }
  if constexpr (kTransposes) {
    __shared__ uint4 tile[ByteTile::kChunks];
    if (row < arguments.rows && col < arguments.cols) {
      uint32_t columns[4][4];
      transpose_bytes({loaded[0].x, loaded[1].x, loaded[2].x, loaded[3].x}, columns[0]);
      transpose_bytes({loaded[0].y, loaded[1].y, loaded[2].y, loaded[3].y}, columns[1]);
      transpose_bytes({loaded[0].z, loaded[1].z, loaded[2].z, loaded[3].z}, columns[2]);
      transpose_bytes({loaded[0].w, loaded[1].w, loaded[2].w, loaded[3].w}, columns[3]);
      ByteTile::put(tile, patch, group, columns);
    }
    __syncthreads();
    ByteTile::store<kThreads>(tile, tile_row, tile_col, arguments.rows, arguments.cols, arguments.transpose);
  }
}

}  // namespace

cudaError_t launch_take_rows(const TakeRowsArguments& arguments, cudaStream_t stream) {
  if (arguments.rows == 0 || arguments.cols == 0) return cudaSuccess;
  const auto kernel = arguments.transpose != nullptr ? take_rows_transpose_kernel<true>
                                                     : take_rows_transpose_kernel<false>;
  const auto tiles_per_row = static_cast<unsigned>(divide_up(arguments.cols, ByteTile::kCols));
  const auto tiles = static_cast<unsigned>(divide_up(arguments.rows, kTileRows) * tiles_per_row);
  kernel<<<tiles, kThreads, 0, stream>>>(arguments, tiles_per_row);
  return cudaGetLastError();
}

}  // namespace jax_fp8
