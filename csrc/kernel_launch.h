// Launches of kernels that use more than the default 48 KB of shared memory, or whose blocks form clusters.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace jax_fp8 {

// Always pass the most that any launch of the kernel needs, not what this launch needs. The limit is an attribute of
// the kernel, and a CUDA graph instantiates a captured launch later: a launch of a smaller shape in between must not
// have lowered it.
template <typename Kernel>
cudaError_t allow_shared_bytes(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// The carveout: how much of a multiprocessor's memory for L1 cache and shared memory is shared memory, in percent of
// the most that it can be.
template <typename Kernel>
cudaError_t prefer_shared_memory(Kernel kernel, int percent) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent);
}

// Whether the code that runs on this device was compiled for compute capability 9.0 or newer, which has clusters. A new
// device may run PTX that was compiled for an older one, without clusters.
template <typename Kernel>
cudaError_t find_clusters(Kernel kernel, bool& found) {
  cudaFuncAttributes compiled;
  const cudaError_t status = cudaFuncGetAttributes(&compiled, kernel);
  found = status == cudaSuccess && compiled.ptxVersion >= 90;
  return status;
}

// Whether kernels that this thread launches follow a kernel of ours on the same stream, for as long as one of these
// lives. They may begin before that one has ended: see device/programmatic.cuh.
class Following {
 public:
  explicit Following(bool follow) { current() = follow; }
  ~Following() { current() = false; }
  Following(const Following&) = delete;
  Following& operator=(const Following&) = delete;

  static bool& current() {
    static thread_local bool follow = false;
    return follow;
  }
};

// kEarly: a kernel that waits by itself for those before it, which code for compute capability 9.0 or newer can.
enum class Begins { kInTurn, kEarly };

struct Clusters {
  int64_t blocks;               // of the whole grid
  unsigned blocks_per_cluster;  // 0: a launch without clusters, for a device that has none
  int threads;                  // of a block
  size_t shared_bytes;          // of a block: dynamic shared memory, in addition to what the kernel declares
};

class ClusterLaunch {
 public:
  ClusterLaunch(const Clusters& clusters, cudaStream_t stream, Begins begins = Begins::kInTurn) {
    if (clusters.blocks_per_cluster > 0) {
      cudaLaunchAttribute& cluster = attributes_[config_.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim.x = clusters.blocks_per_cluster, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    }
    if (begins == Begins::kEarly && Following::current()) {
      cudaLaunchAttribute& early = attributes_[config_.numAttrs++];
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
    }
    config_.gridDim = dim3(static_cast<unsigned>(clusters.blocks));
    config_.blockDim = dim3(static_cast<unsigned>(clusters.threads));
    config_.dynamicSmemBytes = clusters.shared_bytes;
    config_.stream = stream;
    config_.attrs = attributes_;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config_ points at attributes_
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;

  // How many clusters can run on the device at once. The blocks of a cluster must share a GPC, so the number is zero
  // where no GPC has enough free multiprocessors. 8 blocks are the portable size; more need the attribute set here.
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
  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_ = {};
};

}  // namespace jax_fp8
