// The kernel reads a row of x once for each row that it fills, mostly from L2, and writes every byte once.
#include "device/byte_tile.cuh"
#include "launch.h"
#include "take_rows.h"

namespace jax_fp8 {
namespace {

constexpr int kBlocks = 8;  // on a multiprocessor, so that many loads are under way

__device__ inline uint4 load_row(const TakeRowsArguments& arguments, int64_t row, int64_t col) {
  const int32_t source = row < arguments.rows ? __ldg(arguments.sources + row) : -1;
  if (source < 0 || source >= arguments.of_x) return make_uint4(0, 0, 0, 0);
  return __ldg(reinterpret_cast<const uint4*>(arguments.x + source * arguments.cols + col));
}

template <bool kTransposes>
__global__ void __launch_bounds__(kByteTileThreads, kBlocks)
    take_rows_transpose_kernel(const TakeRowsArguments arguments, unsigned tiles_per_row) {
  const BytePatch patch(tiles_per_row);
  const bool has_bytes = patch.row < arguments.rows && patch.col < arguments.cols;
  uint4 loaded[kPatchRows];
  if (has_bytes) {
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) loaded[r] = load_row(arguments, patch.row + r, patch.col);
    uint8_t* const first = arguments.taken + patch.row * arguments.cols + patch.col;
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      if (patch.row + r < arguments.rows) *reinterpret_cast<uint4*>(first + r * arguments.cols) = loaded[r];
    }
  }
  if constexpr (kTransposes) {
    __shared__ uint4 tile[ByteTile::kChunks];
    if (has_bytes) patch.put(tile, loaded);
    __syncthreads();
    ByteTile::store<kByteTileThreads>(tile, patch.tile_row, patch.tile_col, arguments.rows, arguments.cols,
                                      arguments.transpose);
  }
}

}  // namespace

cudaError_t launch_take_rows(const TakeRowsArguments& arguments, cudaStream_t stream) {
  if (arguments.rows == 0 || arguments.cols == 0) return cudaSuccess;
  const auto kernel = arguments.transpose != nullptr ? take_rows_transpose_kernel<true>
                                                     : take_rows_transpose_kernel<false>;
  const auto tiles_per_row = static_cast<unsigned>(divide_up(arguments.cols, ByteTile::kCols));
  const auto tiles = static_cast<unsigned>(divide_up(arguments.rows, kTileRows) * tiles_per_row);
  kernel<<<tiles, kByteTileThreads, 0, stream>>>(arguments, tiles_per_row);
  return cudaGetLastError();
}

}  // namespace jax_fp8
