// Launching: which kernel, and how much of a row shared memory holds. The kernels are device/cross_entropy.cuh.
#include "cross_entropy.h"

#include <algorithm>

#include "device/by_dtype.cuh"
#include "device/cross_entropy.cuh"
#include "kernel_launch.h"
#include "launch.h"

namespace jax_fp8 {
namespace {

// As much as each of kBlocks blocks on a multiprocessor can have. CUDA keeps 1 KB a block for itself, and of what a
// multiprocessor has, one block alone may ask for all but that.
cudaError_t find_shared_bytes(int& bytes) {
  constexpr int kReserved = 1024, kStatic = 512;  // more than the kernel's own arrays
  static_assert(sizeof(cross_entropy::Scratch) <= kStatic);
  int device = 0, most = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  bytes = (most + kReserved) / cross_entropy::kBlocks - kReserved - kStatic;
  return status;
}

template <typename T>
cudaError_t launch_rows(const cross_entropy::Rows<T>& rows, unsigned count, cudaStream_t stream) {
  constexpr int kVectorBytes = kVectorWidth * sizeof(T);
  const auto kernel = cross_entropy::rows_kernel<T>;
  int available = 0;
  bool clusters = false;
  cudaError_t status = find_shared_bytes(available);
  if (status == cudaSuccess) status = find_clusters(kernel, clusters);
  if (status != cudaSuccess) return status;
  const int capacity = available / kVectorBytes * kVectorWidth, vocab = static_cast<int>(rows.vocab);
  int blocks = 1;
  while (clusters && vocab > blocks * capacity && blocks < cross_entropy::kMaxClusterBlocks) blocks *= 2;
  const auto part = static_cast<int>(divide_up(vocab / kVectorWidth, blocks)) * kVectorWidth;
  const int held = std::min(part, capacity);

  status = allow_shared_bytes(kernel, available);
  if (status == cudaSuccess) status = prefer_shared_memory(kernel, 100);
  if (status != cudaSuccess) return status;
  const Clusters of_rows{
      .blocks = int64_t{count} * blocks,
      .blocks_per_cluster = blocks > 1 ? static_cast<unsigned>(blocks) : 0,
      .threads = cross_entropy::kThreads,
      .shared_bytes = static_cast<size_t>(held) * sizeof(T),
  };
  return ClusterLaunch(of_rows, stream)(kernel, rows, blocks, held);
}

template <typename T>
cudaError_t launch_any(const cross_entropy::Rows<T>& rows, unsigned count, cudaStream_t stream) {
  cross_entropy::any_kernel<T><<<count, cross_entropy::kThreads, 0, stream>>>(rows);
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
    const auto launch = vectorized ? launch_rows<T> : launch_any<T>;
    status = launch(rows, static_cast<unsigned>(arguments.rows), stream);
  });
  return status;
}

}  // namespace jax_fp8
