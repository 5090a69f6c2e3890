// The kernel reads and writes every byte once.
#include "device/byte_tile.cuh"
#include "launch.h"
#include "transpose.h"

namespace jax_fp8 {
namespace {

// 8 blocks hold 128 KB of x on a multiprocessor. One of Ada's has room for 6 blocks, 96 KB. While some blocks wait for
// their loads, others store.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocks = 6;
#else
constexpr int kBlocks = 8;
#endif

// Rows and columns must be multiples of 16, and pointers of 16 bytes.
__global__ void __launch_bounds__(kByteTileThreads, kBlocks)
    transpose_kernel(const uint8_t* __restrict__ x, uint8_t* __restrict__ transpose, int64_t rows, int64_t cols,
                     unsigned tiles_per_row) {
  __shared__ uint4 tile[ByteTile::kChunks];
  const BytePatch patch(tiles_per_row);
  if (patch.row < rows && patch.col < cols) {
    const uint8_t* const first = x + patch.row * cols + patch.col;
    uint4 loaded[kPatchRows];
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) loaded[r] = __ldg(reinterpret_cast<const uint4*>(first + r * cols));
    patch.put(tile, loaded);
  }
  __syncthreads();
  ByteTile::store<kByteTileThreads>(tile, patch.tile_row, patch.tile_col, rows, cols, transpose);
}

// ---- one byte at a time: any shape ----------------------------------------------------------------------------------

constexpr int kAtOnce = kByteTileThreads / kTileRows;
static_assert(ByteTile::kCols == kTileRows, "read by rows and written by columns in the same way");

__global__ void __launch_bounds__(kByteTileThreads)
    transpose_any_kernel(const uint8_t* __restrict__ x, uint8_t* __restrict__ transpose, int64_t rows, int64_t cols,
                         unsigned tiles_per_row) {
  __shared__ uint8_t tile[kTileRows][ByteTile::kCols + 4];  // the padding of 4 bytes shifts each row by one bank
  const int64_t tile_row = int64_t{blockIdx.x / tiles_per_row} * kTileRows;
  const int64_t tile_col = int64_t{blockIdx.x % tiles_per_row} * ByteTile::kCols;
  const int inner = threadIdx.x % kTileRows;
  const int outer = threadIdx.x / kTileRows;
  for (int r = outer; r < kTileRows && tile_row + r < rows && tile_col + inner < cols; r += kAtOnce) {
    tile[r][inner] = x[(tile_row + r) * cols + tile_col + inner];
  }
  __syncthreads();
  for (int c = outer; c < ByteTile::kCols && tile_col + c < cols && tile_row + inner < rows; c += kAtOnce) {
    transpose[(tile_col + c) * rows + tile_row + inner] = tile[inner][c];
  }
}

}  // namespace

cudaError_t launch_transpose(const TransposeArguments& arguments, cudaStream_t stream) {
  if (arguments.rows == 0 || arguments.cols == 0) return cudaSuccess;
  const bool vectorized = are_aligned({arguments.x, arguments.transpose}) &&
                          arguments.rows % kBytesAtOnce == 0 && arguments.cols % kBytesAtOnce == 0;
  const auto kernel = vectorized ? transpose_kernel : transpose_any_kernel;
  const auto tiles_per_row = static_cast<unsigned>(divide_up(arguments.cols, ByteTile::kCols));
  const auto tiles = static_cast<unsigned>(divide_up(arguments.rows, kTileRows) * tiles_per_row);
  kernel<<<tiles, kByteTileThreads, 0, stream>>>(arguments.x, arguments.transpose, arguments.rows, arguments.cols,
                                                 tiles_per_row);
  return cudaGetLastError();
}

}  // namespace jax_fp8
