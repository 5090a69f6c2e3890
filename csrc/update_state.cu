// One block for each row. Its threads load up to 1,024 amaxes of the history, all of a usual one, before they wait for
// any of them.
#include "device/fp8.cuh"
#include "device/reduce.cuh"
#include "update_state.h"

namespace jax_fp8 {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPerThread = 4;
constexpr int kChunk = kThreads * kPerThread;

// ---- the table of the leaves that a launch updates, in its parameters -----------------------------------------------

constexpr int kParameterBytes = 32764;  // of a kernel
constexpr int kTableLeaves = 512;

struct StateTable {
  int64_t first_row[kTableLeaves];  // ascending
  StateLeaf leaves[kTableLeaves];
  int leaf_count;
  const float* recorded;  // of the first row in the table
  StateCounts* counts;
  UpdateRule rule;
};
static_assert(sizeof(StateTable) <= kParameterBytes, "the leaves of a launch travel in its parameters");

__device__ inline int slot_of(const StateTable& table, int64_t row) {
  int low = 0, high = table.leaf_count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (table.first_row[middle] <= row ? low : high) = middle;
  }
  return low;
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

// NaN counts as larger than every number, as in the reference.
__device__ inline float larger_of(float a, float b) { return a > b || a != a ? a : b; }

// The largest over the block, or NaN if there is one. Every thread of the block must call it.
__device__ inline float largest_of_block(float largest) {
  __shared__ float of_warp[kWarps];
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    largest = larger_of(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, distance));
  }
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) largest = larger_of(largest, of_warp[warp]);
  return largest;
}

__device__ inline Fp8Type format_of(int64_t row, const UpdateRule& rule) {
  return row % kGemmRows == kGemmRows - 1 ? rule.backward : rule.forward;
}

template <Fp8Type kFormat>
constexpr float kSmallestNormal = kFormat == Fp8Type::kE4M3 ? 0x1p-6f : 0x1p-14f;

__device__ inline float smallest_normal_of(Fp8Type format) {
  return format == Fp8Type::kE4M3 ? kSmallestNormal<Fp8Type::kE4M3> : kSmallestNormal<Fp8Type::kE5M2>;
}

// The largest amax at whose scale `staged` is still a normal FP8 number; infinity if the rule forgets no outliers.
__device__ inline float limit_of(float staged, Fp8Type format, const UpdateRule& rule) {
  if (!rule.forget_outliers) return __int_as_float(0x7F800000);
  const float range = format == Fp8Type::kE4M3
                          ? kFp8Max<Fp8Type::kE4M3> / kSmallestNormal<Fp8Type::kE4M3>
                          : kFp8Max<Fp8Type::kE5M2> / kSmallestNormal<Fp8Type::kE5M2>;  // exact
  return __fdiv_rn(__fmul_rn(staged, range), rule.headroom);
}

__device__ inline float scale_of(float amax, Fp8Type format, const UpdateRule& rule) {
  const AmaxRule amax_rule{.headroom = rule.headroom, .amax_epsilon = 0.0f, .power_2_scale = false};
  return format == Fp8Type::kE4M3 ? scale_from_amax<Fp8Type::kE4M3>(amax, amax_rule)
                                  : scale_from_amax<Fp8Type::kE5M2>(amax, amax_rule);
}

__global__ void __launch_bounds__(kThreads) update_state_kernel(const __grid_constant__ StateTable table) {
  const float infinity = __int_as_float(0x7F800000);
  const int slot = slot_of(table, blockIdx.x);
  const StateLeaf& leaf = table.leaves[slot];
  const int64_t row = blockIdx.x - table.first_row[slot];
  float* const history = leaf.history + row * leaf.length;

  // All threads read slot 0 here. One thread clears it below, after the first barrier.
  const float staged = larger_of(history[0], table.recorded[blockIdx.x]);
  const bool ran = staged > 0.0f && staged < infinity;
  const Fp8Type format = format_of(row, table.rule);
  const float limit = limit_of(staged, format, table.rule);
  float largest = staged;
  for (int64_t start = 0; start < leaf.length; start += kChunk) {
    const int64_t place = start + threadIdx.x;
    float moved[kPerThread];  // the history, shifted by one slot to the left
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int64_t from = place + i * kThreads + 1;
      moved[i] = from < leaf.length ? history[from] : staged;
    }
    __syncthreads();  // what a thread writes, its neighbour has read
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int64_t to = place + i * kThreads;
      if (to < leaf.length && (ran || to == 0)) history[to] = to == 0 ? 0.0f : moved[i];
      largest = larger_of(largest, moved[i] > limit ? staged : moved[i]);
    }
  }
  const float amax = table.rule.most_recent ? staged : largest_of_block(largest);
  if (threadIdx.x != 0) return;
  if (ran) {
    if (staged < __fmul_rn(leaf.scale[row], smallest_normal_of(format))) atomicAdd(&table.counts->underflowing, 1u);
    leaf.scale[row] = scale_of(amax, format, table.rule);
  } else if (!(fabsf(staged) < infinity)) {
    atomicAdd(&table.counts->nonfinite, 1u);
  }
}

// ---- launching ------------------------------------------------------------------------------------------------------

// Collects leaves, and launches the kernel when the table is full.
class Launcher {
 public:
  Launcher(const UpdateStateArguments& arguments, cudaStream_t stream) : stream_(stream) {
    table_.leaf_count = 0;
    table_.recorded = arguments.recorded;
    table_.counts = arguments.counts;
    table_.rule = arguments.rule;
  }

  cudaError_t add(const StateLeaf& leaf) {
    const int slot = table_.leaf_count++;
    table_.first_row[slot] = rows_;
    table_.leaves[slot] = leaf;
    rows_ += leaf.rows;
    return table_.leaf_count == kTableLeaves ? launch() : cudaSuccess;
  }

  cudaError_t launch() {
    if (rows_ == 0) return cudaSuccess;
    update_state_kernel<<<static_cast<unsigned>(rows_), kThreads, 0, stream_>>>(table_);
    table_.recorded += rows_;
    table_.leaf_count = 0;
    rows_ = 0;
    return cudaGetLastError();
  }

 private:
  cudaStream_t stream_;
  int64_t rows_ = 0;
  StateTable table_;
};

}  // namespace

cudaError_t launch_update_state(const UpdateStateArguments& arguments, cudaStream_t stream) {
  cudaError_t status = cudaMemsetAsync(arguments.counts, 0, sizeof(StateCounts), stream);
  Launcher launcher(arguments, stream);
  for (int i = 0; i < arguments.leaf_count && status == cudaSuccess; ++i) {
    if (arguments.leaves[i].rows != 0) status = launcher.add(arguments.leaves[i]);
  }
  return status == cudaSuccess ? launcher.launch() : status;
}

}  // namespace jax_fp8
