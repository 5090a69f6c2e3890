// The kernel for leaves that are cast with one scale or not at all, and the launches of both kinds of kernels. The
// kernel for leaves that are cast by tile is in device/adam_by_tile.cuh.
//
// The parameters of a kernel hold the table of its leaves, so a step copies no table to the device and one launch
// updates hundreds of leaves.
#include "adam.h"

#include <cmath>

#include "device/adam.cuh"
#include "device/adam_by_tile.cuh"
#include "device/adam_table.cuh"
#include "device/reduce.cuh"
#include "device/tile.cuh"
#include "kernel_launch.h"
#include "launch.h"

namespace jax_fp8 {
namespace {

constexpr int kTableLeaves = 336;
using AdamTable = LeafTable<kTableLeaves>;
static_assert(sizeof(AdamTable) <= kParameterBytes, "the leaves of a launch travel in its parameters");

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <typename Kind>
__global__ void __launch_bounds__(kTileThreads, Kind::kBlocks) adam_kernel(const __grid_constant__ AdamTable table) {
  __shared__ uint4 tile[LeafTile::kChunks];
  const int slot = slot_of(table, blockIdx.x);
  const Step step = step_of(table, slot);
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
    const int64_t first = walk.at(vector);
    Words<kTileWidth> words[kCount];
    load_vectors(leaf, walk, first, words);
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

  // The last elements of a flat leaf, fewer than a vector, one for each thread. Rows of a tile are whole vectors.
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

// ---- before the kernel: write the new scales, and clear the amaxes --------------------------------------------------

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
  void (*by_tile)(SquareTable);
  int square_carveout;
};

template <typename Kind>
constexpr Kernel kernel() {
  if constexpr (Kind::kMayHaveParam) {
    return {Kind::takes, adam_kernel<Kind>, adam_by_tile_kernel<Kind>, kSquareCarveout<Kind>};
  } else {
    return {Kind::takes, adam_kernel<Kind>, nullptr, 0};
  }
}

constexpr Storage kNone = Storage::kNone, kF32 = Storage::kFloat32, kBF16 = Storage::kBFloat16, kE4M3 = Storage::kE4M3,
                  kLow = Storage::kRemainder;

// The first kernel that takes a leaf updates it. Common dtypes of gradient, moments, param and master have kernels in
// which the compiler knows them; the last takes every leaf and branches at run time.
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

void put(AdamTable& table, int slot, const AdamEntry& entry) { table.leaves[slot] = entry.leaf; }

void put(SquareTable& table, int slot, const AdamEntry& entry) {
  table.of_leaves.leaves[slot] = entry.leaf;
  table.squares[slot] = entry.squares;
}

AdamTable& leaves_of(AdamTable& table) { return table; }
LeafTable<kSquareTableLeaves>& leaves_of(SquareTable& table) { return table.of_leaves; }

cudaError_t launch(const Kernel& kernel, const AdamTable& table, unsigned blocks, cudaStream_t stream) {
  kernel.function<<<blocks, kTileThreads, 0, stream>>>(table);
  return cudaGetLastError();
}

cudaError_t launch(const Kernel& kernel, const SquareTable& table, unsigned blocks, cudaStream_t stream) {
  const auto by_tile = kernel.by_tile;
  cudaError_t status = allow_shared_bytes(by_tile, kStagedBytes);
  if (status == cudaSuccess) status = prefer_shared_memory(by_tile, kernel.square_carveout);
  if (status != cudaSuccess) return status;
  by_tile<<<blocks, kTileThreads, kStagedBytes, stream>>>(table);
  return cudaGetLastError();
}

// Collects leaves, and launches the kernel when the table is full.
template <typename Table, int kLeaves>
class Launcher {
 public:
  Launcher(const AdamArguments& arguments, const Kernel& kernel, cudaStream_t stream)
      : kernel_(kernel), stream_(stream) {
    auto& leaves = leaves_of(table_);
    leaves.leaf_count = 0;
    leaves.first_leaf = arguments.first_leaf;
    leaves.adam_w_mode = arguments.adam_w_mode;
    leaves.scalars = arguments.scalars;
    leaves.scales = arguments.scales;
    leaves.seed = arguments.seed;
    leaves.places = arguments.places;
  }

  Table& table() { return table_; }

  cudaError_t add(const AdamEntry& entry, int number) {
    auto& leaves = leaves_of(table_);
    const int slot = leaves.leaf_count++;
    leaves.first_block[slot] = static_cast<uint32_t>(blocks_);
    leaves.number[slot] = number;
    put(table_, slot, entry);
    blocks_ += blocks_of(entry.leaf);
    return leaves.leaf_count == kLeaves ? launch() : cudaSuccess;
  }

  cudaError_t launch() {
    auto& leaves = leaves_of(table_);
    if (leaves.leaf_count == 0) return cudaSuccess;
    const auto blocks = static_cast<unsigned>(blocks_);
    const cudaError_t status = jax_fp8::launch(kernel_, table_, blocks, stream_);
    leaves.leaf_count = 0;
    blocks_ = 0;
    return status;
  }

 private:
  const Kernel& kernel_;
  cudaStream_t stream_;
  int64_t blocks_ = 0;
  Table table_;
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

bool is_cast_by_tile(const AdamEntry& entry) { return entry.squares.scales != nullptr; }

// The first leaf of a shared cast by tile has no scale to write here, but an amax to clear.
bool renews(const AdamEntry& entry) {
  const AdamRenewed& renewed = entry.renewed;
  return renewed.scale != nullptr || renewed.mu_scale != nullptr || renewed.nu_scale != nullptr ||
         is_cast_by_tile(entry);
}

}  // namespace

cudaError_t launch_adam(const AdamArguments& arguments, cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  ScalarLauncher scalars(arguments, stream);
  for (int i = 0; i < arguments.leaf_count && status == cudaSuccess; ++i) {
    const AdamEntry& entry = arguments.entries[i];
    if (renews(entry)) status = scalars.add(entry, i);
  }
  if (status == cudaSuccess) status = scalars.launch();
  const TileRule& rule = arguments.tile_rule;
  for (const Kernel& kernel : kKernels) {
    Launcher<AdamTable, kTableLeaves> launcher(arguments, kernel, stream);
    Launcher<SquareTable, kSquareTableLeaves> by_tile(arguments, kernel, stream);
    by_tile.table().rule = {std::ldexp(1.0f, rule.margin), rule.amax_epsilon, rule.power_2_scale};
    for (int i = 0; i < arguments.leaf_count && status == cudaSuccess; ++i) {
      const AdamEntry& entry = arguments.entries[i];
      if (blocks_of(entry.leaf) == 0 || &kernel_of(entry.leaf) != &kernel) continue;
      status = is_cast_by_tile(entry) ? by_tile.add(entry, i) : launcher.add(entry, i);
    }
    if (status == cudaSuccess) status = launcher.launch();
    if (status == cudaSuccess) status = by_tile.launch();
  }
  return status;
}

}  // namespace jax_fp8
