// Chunks of 16384 elements: flat where the shape does not matter, tiles of 128 x 128 where a transpose is written.
#include "adam.h"
#include "device/adam.cuh"
#include "device/reduce.cuh"
#include "device/tile.cuh"
#include "launch.h"

namespace jax_fp8 {
namespace {

// A warp has a row of a tile, four neighbours a thread: then every access of a warp is of whole 128-byte lines, be the
// elements 4 bytes each or 1. A tile is four rounds of 8 x 32 patches, one per thread.
constexpr int kTileThreads = 256;
constexpr int kTileWidth = 4;
constexpr int kGroups = 32;
using LeafTile = Tile<kTileWidth, kGroups>;
constexpr int kTileCols = LeafTile::kCols;
constexpr int kRoundPatches = kTileThreads / kGroups;
constexpr int kRoundRows = kRoundPatches * kPatchRows;
constexpr int kVectors = kTileRows / kRoundPatches;  // of four neighbours, per thread
constexpr int kChunk = kTileThreads * kTileWidth * kVectors;
static_assert(kTileRows * kTileCols == kChunk, "a chunk is a tile, or as many elements in a row");

// ---- the table: which leaves a launch updates, in its parameters ----------------------------------------------------

constexpr int kParameterBytes = 32764;  // of a kernel
constexpr int kTableLeaves = 336;

struct AdamTable {
  uint32_t first_block[kTableLeaves];  // ascending
  int number[kTableLeaves];            // of the leaf within the whole call
  AdamLeaf leaves[kTableLeaves];
  int leaf_count;
  int first_leaf;
  bool adam_w_mode;
  const float* scalars;
  const float* scales;
  const uint32_t* seed;
};
static_assert(sizeof(AdamTable) <= kParameterBytes, "the leaves of a launch travel in its parameters");

__device__ inline int slot_of(const AdamTable& table, uint32_t block) {
  int low = 0, high = table.leaf_count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (table.first_block[middle] <= block ? low : high) = middle;
  }
  return low;
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

// Which elements a thread updates: vector v starts at first + v / 4 * round_stride + v % 4 * stride,
// if it ends before `end`.
struct Walk {
  int64_t first, round_stride, stride, end;
};

__device__ inline Walk flat_walk(const AdamLeaf& leaf, uint32_t chunk) {
  const int64_t stride = kTileThreads * kTileWidth;
  return {chunk * int64_t{kChunk} + threadIdx.x * kTileWidth, stride * kPatchRows, stride, leaf.rows * leaf.cols};
}

__device__ inline Walk tile_walk(const AdamLeaf& leaf, int64_t tile_row, int64_t tile_col) {
  const int64_t row = tile_row + threadIdx.x / kGroups * kPatchRows;
  const int64_t col = tile_col + threadIdx.x % kGroups * kTileWidth;
  return {row * leaf.cols + col, kRoundRows * leaf.cols, leaf.cols, col < leaf.cols ? leaf.rows * leaf.cols : 0};
}

__device__ inline void put_patch(uint4* tile, int round, const uint32_t (&rows)[kPatchRows]) {
  uint32_t columns[1][kTileWidth];
  transpose_bytes(rows, columns[0]);
  LeafTile::put(tile, threadIdx.x / kGroups + round * kRoundPatches, threadIdx.x % kGroups, columns);
}

// A patch of the rowwise values in a shared cast, whose rows are longer than those of the leaf.
__device__ inline void store_patch(const AdamLeaf& leaf, int64_t tile_row, int64_t tile_col, int round,
                                   const uint32_t (&rows)[kPatchRows]) {
  const int64_t row = tile_row + round * kRoundRows + threadIdx.x / kGroups * kPatchRows;
  const int64_t col = tile_col + threadIdx.x % kGroups * kTileWidth;
  if (row >= leaf.rows || col >= leaf.cols) return;
#pragma unroll
  for (int i = 0; i < kPatchRows; ++i) {
    store_words(leaf.values, (row + i) * leaf.values_stride + col, kTileWidth, rows + i);
  }
}

// How the leaves of a kernel are kept. What is known to the compiler costs no instruction; a kernel that takes every
// leaf decides at run time, the same way for a whole block, in code that is several times as long. kInFlight vectors
// are loaded by a thread before it needs the first; kBlocks are resident on a multiprocessor.
template <Storage kG, Storage kMoments, Storage kParam, Storage kMaster>
struct Known {
  static bool takes(const AdamLeaf& leaf) {
    return leaf.g_storage == kG && leaf.mu_storage == kMoments && leaf.nu_storage == kMoments &&
           leaf.param_storage == kParam && leaf.master_storage == kMaster;
  }
  static __device__ void tell(AdamLeaf& leaf) {
    leaf.g_storage = kG, leaf.mu_storage = leaf.nu_storage = kMoments;
    leaf.param_storage = kParam, leaf.master_storage = kMaster;
  }
  // FP8 moments are mostly arithmetic, and want more warps. The others want long runs of loads between runs of stores,
  // for memory that turns around less often: measured, 9.3 instead of 9.5 ms for 1.3 billion params.
  static constexpr int kInFlight = is_fp8(kMoments) ? 2 : 4;
  static constexpr int kBlocks = is_fp8(kMoments) ? 4 : 2;
};

struct Unknown {
  static bool takes(const AdamLeaf&) { return true; }
  static __device__ void tell(AdamLeaf&) {}
  static constexpr int kInFlight = 1;
  static constexpr int kBlocks = 4;
};

template <typename Kind>
__global__ void __launch_bounds__(kTileThreads, Kind::kBlocks) adam_kernel(const __grid_constant__ AdamTable table) {
  __shared__ uint4 tile[LeafTile::kChunks];
  const int slot = slot_of(table, blockIdx.x);
  const int number = table.number[slot];
  Step step = step_of(table.scalars, table.scales + number * kAdamScales, table.seed);
  step.number = table.first_leaf + number;
  step.couples_decay = !table.adam_w_mode;
  if (step.scalars[kApply] == 0.0f) return;
  AdamLeaf leaf = table.leaves[slot];
  Kind::tell(leaf);

  const uint32_t chunk = blockIdx.x - table.first_block[slot];
  const bool transposing = leaf.values_t != nullptr;
  const auto tiles_per_row = static_cast<uint32_t>((leaf.cols + kTileCols - 1) / kTileCols);
  const int64_t tile_row = transposing ? int64_t{chunk / tiles_per_row} * kTileRows : 0;
  const int64_t tile_col = transposing ? int64_t{chunk % tiles_per_row} * kTileCols : 0;
  const Walk walk = transposing ? tile_walk(leaf, tile_row, tile_col) : flat_walk(leaf, chunk);
  float amax = 0.0f;

  constexpr int kCount = Kind::kInFlight;
  uint32_t rows[kPatchRows];
#pragma unroll 1
  for (int vector = 0; vector < kVectors; vector += kCount) {  // not unrolled: the instruction cache is small
    const int64_t first = walk.first + vector / kPatchRows * walk.round_stride + vector % kPatchRows * walk.stride;
    Words<kTileWidth> words[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (first + i * walk.stride + kTileWidth <= walk.end) load(leaf, first + i * walk.stride, words[i]);
    }
#pragma unroll
    for (int i = 0; i + kCount < kPatchRows; ++i) rows[i] = rows[i + kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (first + i * walk.stride + kTileWidth > walk.end) continue;
      rows[kPatchRows - kCount + i] = update(leaf, step, first + i * walk.stride, words[i], amax);
    }
    if (transposing && (vector + kCount) % kPatchRows == 0) {
      if (leaf.values_stride != 0) store_patch(leaf, tile_row, tile_col, vector / kPatchRows, rows);
      put_patch(tile, vector / kPatchRows, rows);
    }
  }

  // The last elements of a flat leaf, fewer than a vector. The rows of a tile are whole vectors.
  const int64_t rest = walk.end - walk.end % kTileWidth + threadIdx.x;
  if (!transposing && rest < walk.end && rest / kChunk == chunk) {
    Words<1> words;
    load(leaf, rest, words);
    update(leaf, step, rest, words, amax);
  }
  if (transposing) {
    __syncthreads();
    LeafTile::store<kTileThreads, CachePolicy::kTouchedOnce>(tile, tile_row, tile_col, leaf.rows, leaf.cols,
                                                             leaf.values_t);
  }
  if (leaf.amax != nullptr) merge_amax<kTileThreads>(amax, leaf.amax);
}

// ---- before the kernel: scales as they will be, and amaxes at zero --------------------------------------------------

constexpr int kScalarLeaves = 800;

struct ScalarTable {
  int number[kScalarLeaves];  // of the leaf within the whole call
  AdamRenewed renewed[kScalarLeaves];
  float* amax[kScalarLeaves];
  int leaf_count;
  const float* scalars;
  const float* scales;
};
static_assert(sizeof(ScalarTable) <= kParameterBytes, "the leaves of a launch travel in its parameters");

__global__ void scalar_kernel(const __grid_constant__ ScalarTable table) {
  const int slot = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (slot >= table.leaf_count || table.scalars[kApply] == 0.0f) return;
  const float* scales = table.scales + table.number[slot] * kAdamScales;
  const AdamRenewed& renewed = table.renewed[slot];
  if (renewed.scale != nullptr) *renewed.scale = scales[kCastScale];
  if (renewed.mu_scale != nullptr) *renewed.mu_scale = scales[kMuScaleAfter];
  if (renewed.nu_scale != nullptr) *renewed.nu_scale = scales[kNuScaleAfter];
  if (table.amax[slot] != nullptr) *table.amax[slot] = 0.0f;
}

// ---- launching ------------------------------------------------------------------------------------------------------

struct Kernel {
  bool (*takes)(const AdamLeaf&);
  void (*function)(AdamTable);
};

template <typename Kind>
constexpr Kernel kernel() {
  return {Kind::takes, adam_kernel<Kind>};
}

constexpr Storage kNone = Storage::kNone, kF32 = Storage::kFloat32, kBF16 = Storage::kBFloat16, kE4M3 = Storage::kE4M3,
                  kLow = Storage::kRemainder;

// The first that takes a leaf updates it.
constexpr Kernel kKernels[] = {
    kernel<Known<kBF16, kF32, kF32, kNone>>(),    kernel<Known<kF32, kF32, kF32, kNone>>(),
    kernel<Known<kBF16, kF32, kBF16, kF32>>(),    kernel<Known<kF32, kF32, kBF16, kF32>>(),
    kernel<Known<kBF16, kF32, kBF16, kLow>>(),    kernel<Known<kF32, kF32, kBF16, kLow>>(),
    kernel<Known<kBF16, kF32, kNone, kF32>>(),    kernel<Known<kF32, kF32, kNone, kF32>>(),
    kernel<Known<kBF16, kBF16, kF32, kNone>>(),   kernel<Known<kF32, kBF16, kF32, kNone>>(),
    kernel<Known<kBF16, kBF16, kBF16, kF32>>(),   kernel<Known<kF32, kBF16, kBF16, kF32>>(),
    kernel<Known<kBF16, kBF16, kBF16, kLow>>(),   kernel<Known<kF32, kBF16, kBF16, kLow>>(),
    kernel<Known<kBF16, kE4M3, kF32, kNone>>(),   kernel<Known<kF32, kE4M3, kF32, kNone>>(),
    kernel<Known<kBF16, kE4M3, kBF16, kF32>>(),   kernel<Known<kF32, kE4M3, kBF16, kF32>>(),
    kernel<Known<kBF16, kE4M3, kBF16, kLow>>(),   kernel<Known<kF32, kE4M3, kBF16, kLow>>(),
    kernel<Unknown>(),
};

const Kernel& kernel_of(const AdamLeaf& leaf) {
  const Kernel* kernel = kKernels;
  while (!kernel->takes(leaf)) ++kernel;
  return *kernel;
}

int64_t blocks_of(const AdamLeaf& leaf) {
  if (leaf.values_t == nullptr) return divide_up(leaf.rows * leaf.cols, kChunk);
  return divide_up(leaf.rows, kTileRows) * divide_up(leaf.cols, kTileCols);
}

// Collects leaves, and launches them when the table is full.
class Launcher {
 public:
  Launcher(const AdamArguments& arguments, const Kernel& kernel, cudaStream_t stream)
      : kernel_(kernel), stream_(stream) {
    table_.leaf_count = 0;
    table_.first_leaf = arguments.first_leaf;
    table_.adam_w_mode = arguments.adam_w_mode;
    table_.scalars = arguments.scalars;
    table_.scales = arguments.scales;
    table_.seed = arguments.seed;
  }

  cudaError_t add(const AdamLeaf& leaf, int number) {
    const int slot = table_.leaf_count++;
    table_.first_block[slot] = static_cast<uint32_t>(blocks_);
    table_.number[slot] = number;
    table_.leaves[slot] = leaf;
    blocks_ += blocks_of(leaf);
    return table_.leaf_count == kTableLeaves ? launch() : cudaSuccess;
  }

  cudaError_t launch() {
    if (table_.leaf_count == 0) return cudaSuccess;
    kernel_.function<<<static_cast<unsigned>(blocks_), kTileThreads, 0, stream_>>>(table_);
    table_.leaf_count = 0;
    blocks_ = 0;
    return cudaGetLastError();
  }

 private:
  const Kernel& kernel_;
  cudaStream_t stream_;
  int64_t blocks_ = 0;
  AdamTable table_;
};

class ScalarLauncher {
 public:
  ScalarLauncher(const AdamArguments& arguments, cudaStream_t stream) : stream_(stream) {
    table_.leaf_count = 0;
    table_.scalars = arguments.scalars;
    table_.scales = arguments.scales;
  }

  cudaError_t add(const AdamEntry& entry, int number) {
    const int slot = table_.leaf_count++;
    table_.number[slot] = number;
    table_.renewed[slot] = entry.renewed;
    table_.amax[slot] = entry.leaf.amax;
    return table_.leaf_count == kScalarLeaves ? launch() : cudaSuccess;
  }

  cudaError_t launch() {
    if (table_.leaf_count == 0) return cudaSuccess;
    constexpr int kThreads = 128;
    scalar_kernel<<<static_cast<unsigned>(divide_up(table_.leaf_count, kThreads)), kThreads, 0, stream_>>>(table_);
    table_.leaf_count = 0;
    return cudaGetLastError();
  }

 private:
  cudaStream_t stream_;
  ScalarTable table_;
};

bool any(const AdamRenewed& renewed) {
  return renewed.scale != nullptr || renewed.mu_scale != nullptr || renewed.nu_scale != nullptr;
}

}  // namespace

cudaError_t launch_adam(const AdamArguments& arguments, cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  ScalarLauncher scalars(arguments, stream);
  for (int i = 0; i < arguments.leaf_count && status == cudaSuccess; ++i) {
    const AdamEntry& entry = arguments.entries[i];
    if (any(entry.renewed)) status = scalars.add(entry, i);
  }
  if (status == cudaSuccess) status = scalars.launch();
  for (const Kernel& kernel : kKernels) {
    Launcher launcher(arguments, kernel, stream);
    for (int i = 0; i < arguments.leaf_count && status == cudaSuccess; ++i) {
      const AdamLeaf& leaf = arguments.entries[i].leaf;
      if (blocks_of(leaf) != 0 && &kernel_of(leaf) == &kernel) status = launcher.add(leaf, i);
    }
    if (status == cudaSuccess) status = launcher.launch();
  }
  return status;
}

}  // namespace jax_fp8
