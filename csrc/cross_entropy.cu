// The launch: which kernel takes the rows, and how much of a row shared memory holds. The kernels are in
// device/cross_entropy.cuh and device/cross_entropy_ahead.cuh.
#include "cross_entropy.h"

#include <algorithm>

#include "device/by_dtype.cuh"
#include "device/cross_entropy.cuh"
#include "device/cross_entropy_ahead.cuh"
#include "kernel_launch.h"
#include "launch.h"

namespace jax_fp8 {
namespace {

// The dynamic shared memory that each of `blocks` blocks on a multiprocessor may use. CUDA reserves 1 KB for each
// block, and the most that a single block may use is all shared memory of a multiprocessor but this 1 KB. `declared` is
// the size of the kernel's own static arrays.
cudaError_t find_shared_bytes(int blocks, int declared, int& bytes) {
  constexpr int kReserved = 1024;
  int device = 0, most = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  bytes = (most + kReserved) / blocks - kReserved - static_cast<int>(divide_up(declared, 128)) * 128;
  return status;
}

template <typename Kernel>
cudaError_t ask_for_shared_bytes(Kernel kernel, int bytes) {
  const cudaError_t status = allow_shared_bytes(kernel, bytes);
  return status == cudaSuccess ? prefer_shared_memory(kernel, 100) : status;
}

// How many elements of a row fit into so many bytes, in whole vectors.
template <typename T>
int capacity_of(int bytes) {
  return bytes / static_cast<int>(kVectorWidth * sizeof(T)) * kVectorWidth;
}

// One block for each row.
template <typename T>
cudaError_t launch_rows(const cross_entropy::Rows<T>& rows, int64_t count, int available, cudaStream_t stream) {
  const auto kernel = cross_entropy::rows_kernel<T>;
  const cudaError_t status = ask_for_shared_bytes(kernel, available);
  if (status != cudaSuccess) return status;
  const int held = std::min(static_cast<int>(rows.vocab) / kVectorWidth * kVectorWidth, capacity_of<T>(available));
  kernel<<<static_cast<unsigned>(count), cross_entropy::kThreads, held * sizeof(T), stream>>>(rows, held);
  return cudaGetLastError();
}

// How a cluster shares a row. The best split has the most blocks on a multiprocessor, since some compute while others
// wait. Among splits that are equal in this, it has the fewest blocks in a cluster. The loops below go from the worst
// to the best split, so the last one that fits wins.
struct Split {
  int log2_blocks, held;  // both 0: the shared memory of the largest cluster does not hold two buffers of such a row
};

template <typename T>
cudaError_t find_split(int vocab, Split& split) {
  split = {};
  for (int blocks = 1; blocks <= cross_entropy::kAheadBlocks; ++blocks) {
    int available = 0;
    const cudaError_t status = find_shared_bytes(blocks, sizeof(cross_entropy::Told), available);
    if (status != cudaSuccess) return status;
    for (int log2 = cross_entropy::kMaxLog2Blocks; log2 > 0; --log2) {
      const auto held = static_cast<int>(divide_up(vocab / kVectorWidth, 1 << log2)) * kVectorWidth;
      if (held <= capacity_of<T>(available / 2)) split = {log2, held};
    }
  }
  return cudaSuccess;
}

// One cluster for each row, in as many clusters as run at once; these take turns at the rows. `launched` becomes false
// where the device has room for none.
template <typename T>
cudaError_t try_ahead(const cross_entropy::Rows<T>& rows, int64_t count, cudaStream_t stream, bool& launched) {
  const auto kernel = cross_entropy::ahead_kernel<T>;
  int most = 0, room = 0;
  Split split;
  launched = false;
  cudaError_t status = find_split<T>(static_cast<int>(rows.vocab), split);
  if (status == cudaSuccess) status = find_shared_bytes(1, sizeof(cross_entropy::Told), most);
  if (status == cudaSuccess) status = ask_for_shared_bytes(kernel, most);
  if (status != cudaSuccess || split.held == 0) return status;
  Clusters clusters{
      .blocks = 1 << split.log2_blocks,
      .blocks_per_cluster = 1u << split.log2_blocks,
      .threads = cross_entropy::kAheadThreads,
      .shared_bytes = 2 * sizeof(T) * split.held,
  };
  status = ClusterLaunch(clusters, stream).find_room(kernel, room);
  launched = status == cudaSuccess && room > 0;
  if (!launched) return status;
  clusters.blocks = std::min(count, int64_t{room}) << split.log2_blocks;
  return ClusterLaunch(clusters, stream)(kernel, rows, count, split.log2_blocks, split.held);
}

// A row that fits the shared memory of one block goes to one block, and a longer row to a cluster, if the device has
// clusters.
template <typename T>
cudaError_t launch_vectorized(const cross_entropy::Rows<T>& rows, int64_t count, cudaStream_t stream) {
  int available = 0;
  bool found = false, launched = false;
  cudaError_t status = find_shared_bytes(cross_entropy::kBlocks, sizeof(cross_entropy::Scratch), available);
  if (status == cudaSuccess) status = find_clusters(cross_entropy::ahead_kernel<T>, found);
  if (status == cudaSuccess && found && rows.vocab > capacity_of<T>(available)) {
    status = try_ahead(rows, count, stream, launched);
  }
  return status != cudaSuccess || launched ? status : launch_rows(rows, count, available, stream);
}

template <typename T>
cudaError_t launch_any(const cross_entropy::Rows<T>& rows, int64_t count, cudaStream_t stream) {
  cross_entropy::any_kernel<T><<<static_cast<unsigned>(count), cross_entropy::kThreads, 0, stream>>>(rows);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_cross_entropy(const CrossEntropyArguments& arguments, cudaStream_t stream) {
  if (arguments.rows == 0) return cudaSuccess;
  const uintptr_t distance =
      reinterpret_cast<uintptr_t>(arguments.logits) - reinterpret_cast<uintptr_t>(arguments.gradient);
  const bool vectorized = arguments.vocab <= cross_entropy::kMaxVectorizedVocab && distance % 16 == 0;
  cudaError_t status = cudaSuccess;
  by_dtype(arguments.type, [&](auto element) {
    using T = decltype(element);
    const cross_entropy::Rows<T> rows{
        .logits = static_cast<const T*>(arguments.logits),
        .labels = arguments.labels,
        .shares = arguments.shares,
        .z_loss = arguments.z_loss,
        .gradient = static_cast<T*>(arguments.gradient),
        .loss = arguments.loss,
        .lse = arguments.lse,
        .vocab = arguments.vocab,
    };
    const auto launch = vectorized ? launch_vectorized<T> : launch_any<T>;
    status = launch(rows, arguments.rows, stream);
  });
  return status;
}

}  // namespace jax_fp8
