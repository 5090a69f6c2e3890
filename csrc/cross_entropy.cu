// Launching: which kernel, and how much of a row shared memory holds. The kernels are device/cross_entropy.cuh.
#include "cross_entropy.h"

#include <algorithm>

#include "device/by_dtype.cuh"
#include "device/cross_entropy.cuh"
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

// Of a device that has clusters, and code that was compiled for one.
template <typename Kernel>
cudaError_t find_clusters(Kernel kernel, bool& found) {
  cudaFuncAttributes compiled;
  const cudaError_t status = cudaFuncGetAttributes(&compiled, kernel);
  found = status == cudaSuccess && compiled.ptxVersion >= 90;
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

  // Always all of it: a launch that a CUDA graph has captured is instantiated later, and in between another vocabulary
  // may have been launched that needs less.
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, available);
  if (status == cudaSuccess) status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(blocks), cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(count * static_cast<unsigned>(blocks));
  config.blockDim = dim3(cross_entropy::kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(held) * sizeof(T);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = blocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, rows, blocks, held);
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
