// Three kernels: the cast of a flat array, the cast and transpose by tiles, and the same for shapes without 16-byte vectors.
#include "device/dispatch.cuh"
#include "device/fp8.cuh"
#include "device/reduce.cuh"
#include "device/scale_input.cuh"
#include "device/vector.cuh"
#include "quantize.h"

namespace jax_fp8 {
namespace {

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(uint4) == 0; }

// ---- flat ----------------------------------------------------------------------------------------------------------

constexpr int kFlatThreads = 256;

template <typename T>
constexpr int kVectorsPerThread = 8 / sizeof(T);  // 64 bytes in flight per thread

template <typename T>
constexpr int64_t kChunk = int64_t{kFlatThreads} * kVectorWidth * kVectorsPerThread<T>;

template <typename T, Fp8Type kFormat>
__global__ void __launch_bounds__(kFlatThreads)
    quantize_kernel(const T* __restrict__ x, ScaleInput scale, int64_t count, bool aligned,
                    uint8_t* __restrict__ values, float* amax) {
  const float loaded = __ldg(scale.source);
  const int64_t start = blockIdx.x * kChunk<T>;
  float thread_amax = 0.0f;
  if (aligned && start + kChunk<T> <= count) {
    float elements[kVectorsPerThread<T>][kVectorWidth];
#pragma unroll
    for (int v = 0; v < kVectorsPerThread<T>; ++v) {
      load_vector(x + start + (v * kFlatThreads + threadIdx.x) * kVectorWidth, elements[v]);
    }
    const float multiplier = multiplier_from<kFormat>(loaded, scale);
#pragma unroll
    for (int v = 0; v < kVectorsPerThread<T>; ++v) {
      thread_amax = amax_of(thread_amax, elements[v]);
      const uint2 bytes = {quantize_four<kFormat>(elements[v], multiplier),
                           quantize_four<kFormat>(elements[v] + 4, multiplier)};
      *reinterpret_cast<uint2*>(values + start + (v * kFlatThreads + threadIdx.x) * kVectorWidth) = bytes;
    }
  } else {
    const float multiplier = multiplier_from<kFormat>(loaded, scale);
    const int64_t end = min(start + kChunk<T>, count);
    for (int64_t i = start + threadIdx.x; i < end; i += kFlatThreads) {
      const float element = to_float(x[i]);
      thread_amax = amax_of(thread_amax, element);
      values[i] = quantize_one<kFormat>(element, multiplier);
    }
  }
  merge_amax<kFlatThreads>(thread_amax, amax);
}

// ---- tiles of 128 rows x 64 columns: rows and cols are multiples of 16, pointers of 16 bytes -----------------------------
//
// Every access to memory is a full 16-byte instruction over whole 32-byte sectors: rows of x in 128 bytes or more, rows of
// values in 64, rows of values_t in 128.

constexpr int kTileRows = 128;
constexpr int kTileCols = 64;
constexpr int kTileThreads = 256;                            // one patch of 4 rows x 8 columns each
constexpr int kRowsPerPatch = 4;                             // four bytes of a column make one word of the transpose
constexpr int kGroups = kTileCols / kVectorWidth;            // 8 groups of 8 columns
constexpr int kWordsPerColumn = kTileRows / kRowsPerPatch;   // 32, one per bank
constexpr int kChunksPerColumn = kTileRows / sizeof(uint4);  // 8 chunks of 16 rows
static_assert(kGroups * kWordsPerColumn == kTileThreads);

// Blocks per multiprocessor that the registers must allow: 80 KB of x in flight on each, or 128 KB when it is float32.
template <typename T>
constexpr int kTileBlocks = sizeof(T) == 4 ? 4 : 5;

template <typename T, Fp8Type kFormat>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T>)
    quantize_transpose_kernel(const T* __restrict__ x, ScaleInput scale, int64_t rows, int64_t cols,
                              unsigned tiles_per_row, uint8_t* __restrict__ values, uint8_t* __restrict__ values_t,
                              float* amax) {
  // Column c of the tile is 8 chunks of 4 words, all columns starting at bank 0. A warp writes the 4 words of one chunk in each
  // of 8 groups of columns; so chunk i of a column of group g lives at i ^ g, and the 32 writes meet 32 banks. Eight threads
  // that read the 8 chunks of one column meet all banks as well.
  __shared__ uint4 tile[kTileCols * kChunksPerColumn];
  const float loaded = __ldg(scale.source);
  const int64_t tile_row = int64_t{blockIdx.x / tiles_per_row} * kTileRows;
  const int64_t tile_col = int64_t{blockIdx.x % tiles_per_row} * kTileCols;

  const int group = threadIdx.x % kGroups;
  const int patch = threadIdx.x / kGroups;
  const int64_t row = tile_row + patch * kRowsPerPatch;
  const int64_t col = tile_col + group * kVectorWidth;
  float thread_amax = 0.0f;
  if (row < rows && col < cols) {
    float elements[kRowsPerPatch][kVectorWidth];
#pragma unroll
    for (int r = 0; r < kRowsPerPatch; ++r) load_vector(x + (row + r) * cols + col, elements[r]);
    const float multiplier = multiplier_from<kFormat>(loaded, scale);
    uint32_t left[kRowsPerPatch], right[kRowsPerPatch];
#pragma unroll
    for (int r = 0; r < kRowsPerPatch; ++r) {
      thread_amax = amax_of(thread_amax, elements[r]);
      left[r] = quantize_four<kFormat>(elements[r], multiplier);
      right[r] = quantize_four<kFormat>(elements[r] + 4, multiplier);
      *reinterpret_cast<uint2*>(values + (row + r) * cols + col) = {left[r], right[r]};
    }
    uint32_t columns[2][4];
    transpose_bytes(left, columns[0]);
    transpose_bytes(right, columns[1]);
    uint32_t* words = reinterpret_cast<uint32_t*>(tile) + group * kVectorWidth * kWordsPerColumn + (patch ^ (group << 2));
#pragma unroll
    for (int c = 0; c < kVectorWidth; ++c) words[c * kWordsPerColumn] = columns[c / 4][c % 4];
  }
  __syncthreads();

#pragma unroll
  for (int pass = 0; pass < kTileCols * kChunksPerColumn / kTileThreads; ++pass) {
    const int item = pass * kTileThreads + threadIdx.x;
    const int column = item / kChunksPerColumn;
    const int chunk = item % kChunksPerColumn;
    const int64_t out_row = tile_col + column;
    const int64_t out_col = tile_row + chunk * static_cast<int>(sizeof(uint4));
    if (out_row < cols && out_col < rows) {
      const uint4 bytes = tile[column * kChunksPerColumn + (chunk ^ (column / kVectorWidth))];
      *reinterpret_cast<uint4*>(values_t + out_row * rows + out_col) = bytes;
    }
  }
  merge_amax<kTileThreads>(thread_amax, amax);
}

// ---- tiles of 32 x 32, one element at a time: any shape ------------------------------------------------------------------

constexpr int kSmallTile = 32;
constexpr int kSmallThreads = 256;
constexpr int kSmallRows = kSmallThreads / kSmallTile;  // rows of a tile handled at once

template <typename T, Fp8Type kFormat>
__global__ void __launch_bounds__(kSmallThreads)
    quantize_transpose_any_kernel(const T* __restrict__ x, ScaleInput scale, int64_t rows, int64_t cols,
                                  unsigned tiles_per_row, uint8_t* __restrict__ values, uint8_t* __restrict__ values_t,
                                  float* amax) {
  __shared__ uint8_t tile[kSmallTile][kSmallTile + 4];  // the padding moves each row to the next bank
  const float multiplier = multiplier_from<kFormat>(__ldg(scale.source), scale);
  const int64_t tile_row = int64_t{blockIdx.x / tiles_per_row} * kSmallTile;
  const int64_t tile_col = int64_t{blockIdx.x % tiles_per_row} * kSmallTile;
  const int lane = threadIdx.x % kSmallTile;
  const int first = threadIdx.x / kSmallTile;
  float thread_amax = 0.0f;
  for (int r = first; r < kSmallTile; r += kSmallRows) {
    const int64_t row = tile_row + r, col = tile_col + lane;
    if (row >= rows || col >= cols) continue;
    const float element = to_float(x[row * cols + col]);
    thread_amax = amax_of(thread_amax, element);
    tile[r][lane] = values[row * cols + col] = quantize_one<kFormat>(element, multiplier);
  }
  __syncthreads();
  for (int c = first; c < kSmallTile; c += kSmallRows) {
    const int64_t out_row = tile_col + c, out_col = tile_row + lane;
    if (out_row < cols && out_col < rows) values_t[out_row * rows + out_col] = tile[lane][c];
  }
  merge_amax<kSmallThreads>(thread_amax, amax);
}

int64_t tiles_along(int64_t size, int tile) { return (size + tile - 1) / tile; }

}  // namespace

cudaError_t launch_quantize(const QuantizeArguments& arguments, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(arguments.amax, 0, sizeof(float), stream);
  if (cleared != cudaSuccess) return cleared;
  const int64_t count = arguments.rows * arguments.cols;
  const bool aligned = is_aligned(arguments.x) && is_aligned(arguments.values);
  const ScaleInput scale = scale_input(arguments.source, arguments.origin, arguments.scale);
  dispatch(arguments.x_type, arguments.format, [&](auto element, auto format) {
    using T = decltype(element);
    // An empty x has a scale all the same: one block writes it.
    const auto blocks = static_cast<unsigned>(count ? (count + kChunk<T> - 1) / kChunk<T> : 1);
    quantize_kernel<T, decltype(format)::value><<<blocks, kFlatThreads, 0, stream>>>(
        static_cast<const T*>(arguments.x), scale, count, aligned, arguments.values, arguments.amax);
  });
  return cudaGetLastError();
}

cudaError_t launch_quantize_transpose(const QuantizeArguments& arguments, cudaStream_t stream) {
  const int64_t rows = arguments.rows, cols = arguments.cols;
  if (rows * cols == 0) return launch_quantize(arguments, stream);
  const cudaError_t cleared = cudaMemsetAsync(arguments.amax, 0, sizeof(float), stream);
  if (cleared != cudaSuccess) return cleared;
  const bool vectorized = rows % 16 == 0 && cols % 16 == 0 && is_aligned(arguments.x) && is_aligned(arguments.values) &&
                          is_aligned(arguments.values_t);
  const ScaleInput scale = scale_input(arguments.source, arguments.origin, arguments.scale);
  dispatch(arguments.x_type, arguments.format, [&](auto element, auto format) {
    using T = decltype(element);
    const auto kernel = vectorized ? quantize_transpose_kernel<T, decltype(format)::value>
                                   : quantize_transpose_any_kernel<T, decltype(format)::value>;
    const int threads = vectorized ? kTileThreads : kSmallThreads;
    const int64_t tiles_per_column = tiles_along(rows, vectorized ? kTileRows : kSmallTile);
    const auto tiles_per_row = static_cast<unsigned>(tiles_along(cols, vectorized ? kTileCols : kSmallTile));
    const auto blocks = static_cast<unsigned>(tiles_per_column * tiles_per_row);
    kernel<<<blocks, threads, 0, stream>>>(static_cast<const T*>(arguments.x), scale, rows, cols, tiles_per_row, arguments.values,
                                           arguments.values_t, arguments.amax);
  });
  return cudaGetLastError();
}

}  // namespace jax_fp8
