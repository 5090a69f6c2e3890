// The kernel reads and writes every byte once, in tiles of 128 x 128. Each thread moves 16 bytes at a time, and eight
// neighbouring threads a whole line of 128 bytes: accesses are coalesced in the source and in the transpose.
#include "device/tile.cuh"
#include "launch.h"
#include "transpose.h"

namespace jax_fp8 {
namespace {

constexpr int kThreads = 256;  // one patch of 4 rows x 16 columns each
constexpr int kWidth = sizeof(uint4);
constexpr int kGroups = 8;
using ByteTile = Tile<kWidth, kGroups>;
static_assert(kThreads == kGroups * ByteTile::kColumnWords);

// 8 blocks hold 128 KB of x on a multiprocessor. One of Ada's has room for 6 blocks, 96 KB. While some blocks wait for
// their loads, others store.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocks = 6;
#else
constexpr int kBlocks = 8;
#endif

// Rows and columns must be multiples of 16, and pointers of 16 bytes.
__global__ void __launch_bounds__(kThreads, kBlocks)
    transpose_kernel(const uint8_t* __restrict__ x, uint8_t* __restrict__ transpose, int64_t rows, int64_t cols,
                     unsigned tiles_per_row) {
  __shared__ uint4 tile[ByteTile::kChunks];
  const int64_t tile_row = int64_t{blockIdx.x / tiles_per_row} * kTileRows;
  const int64_t tile_col = int64_t{blockIdx.x % tiles_per_row} * ByteTile::kCols;
  const int group = threadIdx.x % kGroups;
  const int patch = threadIdx.x / kGroups;
  const int64_t row = tile_row + patch * kPatchRows;
  const int64_t col = tile_col + group * kWidth;
  if (row < rows && col < cols) {
    uint4 loaded[kPatchRows];
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) loaded[r] = __ldg(reinterpret_cast<const uint4*>(x + (row + r) * cols + col));
    uint32_t columns[4][4];
    transpose_bytes({loaded[0].x, loaded[1].x, loaded[2].x, loaded[3].x}, columns[0]);
    transpose_bytes({loaded[0].y, loaded[1].y, loaded[2].y, loaded[3].y}, columns[1]);
    transpose_bytes({loaded[0].z, loaded[1].z, loaded[2].z, loaded[3].z}, columns[2]);
    transpose_bytes({loaded[0].w, loaded[1].w, loaded[2].w, loaded[3].w}, columns[3]);
    ByteTile::put(tile, patch, group, columns);
  }
  __syncthreads();
  ByteTile::store<kThreads>(tile, tile_row, tile_col, rows, cols, transpose);
}

// ---- one byte at a time: any shape ----------------------------------------------------------------------------------

constexpr int kAtOnce = kThreads / kTileRows;
static_assert(ByteTile::kCols == kTileRows, "read by rows and written by columns in the same way");

__global__ void __launch_bounds__(kThreads)
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
                          arguments.rows % kWidth == 0 && arguments.cols % kWidth == 0;
  const auto kernel = vectorized ? transpose_kernel : transpose_any_kernel;
  const auto tiles_per_row = static_cast<unsigned>(divide_up(arguments.cols, ByteTile::kCols));
  const auto tiles = static_cast<unsigned>(divide_up(arguments.rows, kTileRows) * tiles_per_row);
  kernel<<<tiles, kThreads, 0, stream>>>(arguments.x, arguments.transpose, arguments.rows, arguments.cols,
                                         tiles_per_row);
  return cudaGetLastError();
}

}  // namespace jax_fp8
