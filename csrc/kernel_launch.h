// Launching a kernel that takes more shared memory than usual, or whose blocks form clusters.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace jax_fp8 {

// A kernel may always ask for the most that any of its launches needs: a launch that a CUDA graph has captured is
// instantiated later, and in between another shape may have been launched that needs less.
template <typename Kernel>
cudaError_t allow_shared_bytes(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// In percent of what a multiprocessor has.
template <typename Kernel>
cudaError_t prefer_shared_memory(Kernel kernel, int percent) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent);
}

// Whether the device has clusters, and the kernel was compiled for one: a new device may run what was compiled for an
// old one.
template <typename Kernel>
cudaError_t find_clusters(Kernel kernel, bool& found) {
  cudaFuncAttributes compiled;
  const cudaError_t status = cudaFuncGetAttributes(&compiled, kernel);
  found = status == cudaSuccess && compiled.ptxVersion >= 90;
  return status;
}

struct Clusters {
  int64_t blocks;               // of the whole grid
  unsigned blocks_per_cluster;  // 0: no clusters, as a device wants it that has none
  int threads;                  // of a block
  size_t shared_bytes;          // of a block, beside what the kernel declares
};

class ClusterLaunch {
 public:
  ClusterLaunch(const Clusters& clusters, cudaStream_t stream) {
    cluster_.id = cudaLaunchAttributeClusterDimension;
    cluster_.val.clusterDim.x = clusters.blocks_per_cluster, cluster_.val.clusterDim.y = cluster_.val.clusterDim.z = 1;
    config_.gridDim = dim3(static_cast<unsigned>(clusters.blocks));
    config_.blockDim = dim3(static_cast<unsigned>(clusters.threads));
    config_.dynamicSmemBytes = clusters.shared_bytes;
    config_.stream = stream;
    config_.attrs = &cluster_;
    config_.numAttrs = clusters.blocks_per_cluster ? 1 : 0;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // the configuration holds an address
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;

  // How many clusters a device has room for at once: none, where too few multiprocessors stand side by side. No device
  // promises room for more than 8 blocks.
  template <typename Kernel>
  cudaError_t find_room(Kernel kernel, int& clusters) const {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    return status == cudaSuccess ? cudaOccupancyMaxActiveClusters(&clusters, kernel, &config_) : status;
  }

  template <typename... Parameters, typename... Arguments>
  cudaError_t operator()(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    return cudaLaunchKernelEx(&config_, kernel, arguments...);
  }

 private:
  cudaLaunchAttribute cluster_ = {};
  cudaLaunchConfig_t config_ = {};
};

}  // namespace jax_fp8
