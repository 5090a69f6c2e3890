// The part of CUDA that the kernels of csrc use, for a C++ compiler: keywords, vectors, the runtime's calls.
//
// The compiler finds this file in place of CUDA's header of this name. If a kernel uses a function that is missing, the
// compiler reports an error: add the function here, to intrinsics.h, to warp.h or, for a PTX instruction, to
// instructions.h.
#pragma once

#include <utility>

#include "asynchronous.h"
#include "fibers.h"
#include "instructions.h"
#include "intrinsics.h"
#include "warp.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __CUDA_ARCH_FEAT_SM90_ALL  // the emulation has the instructions of sm_90a

// ---- vectors: as strictly aligned as CUDA's -------------------------------------------------------------------------

#define EMULATION_VECTORS(name, type)                                                       \
  struct alignas(2 * sizeof(type)) name##2 {                                                \
    type x, y;                                                                              \
  };                                                                                        \
  struct alignas(sizeof(type) == 8 ? 16 : 4 * sizeof(type)) name##4 {                       \
    type x, y, z, w;                                                                        \
  };                                                                                        \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                          \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

EMULATION_VECTORS(uchar, unsigned char)
EMULATION_VECTORS(ushort, unsigned short)
EMULATION_VECTORS(int, int)
EMULATION_VECTORS(uint, unsigned)
EMULATION_VECTORS(float, float)
EMULATION_VECTORS(longlong, long long)
EMULATION_VECTORS(ulonglong, unsigned long long)
#undef EMULATION_VECTORS

// ---- the runtime ----------------------------------------------------------------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
  cudaErrorInvalidClusterSize = 912,
};

using cudaStream_t = struct CUstream_st*;

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed,
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};

inline cudaError_t emulation_last_error = cudaSuccess;

inline cudaError_t cudaGetLastError() { return std::exchange(emulation_last_error, cudaSuccess); }
inline cudaError_t cudaPeekAtLastError() { return emulation_last_error; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }

inline cudaError_t cudaMemsetAsync(void* target, int byte, size_t count, cudaStream_t = nullptr) {
  memset(target, byte, count);
  return cudaSuccess;
}

// The limits of a launch until the host raises them: 48 KB of dynamic shared memory, and 8 blocks in a cluster.
struct EmulatedLimits {
  size_t dynamic_shared = 48 * 1024;
  unsigned cluster = 8;
};

template <typename... Parameters>
EmulatedLimits& emulation_limits(void (*kernel)(Parameters...)) {
  static struct {
    void (*kernel)(Parameters...);
    EmulatedLimits limits;
  } entries[64];
  for (auto& entry : entries) {
    if (entry.kernel == nullptr) entry.kernel = kernel;
    if (entry.kernel == kernel) return entry.limits;
  }
  abort();
}

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) emulation_limits(kernel).cluster = value ? 16 : 8;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<size_t>(value) > emulation::kMostShared) return cudaErrorInvalidValue;
  emulation_limits(kernel).dynamic_shared = value;
  return cudaSuccess;
}

struct cudaFuncAttributes {
  int ptxVersion;
  size_t sharedSizeBytes;  // that the kernel declares
};

template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
  *attributes = {.ptxVersion = 90, .sharedSizeBytes = 1};
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(emulation::kMostShared); break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
  }
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
enum { cudaEnableDefault };

inline int emulation_failing_searches = 0;  // for an entry point of the driver

inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  const bool fails = emulation_failing_searches > 0 && emulation_failing_searches-- > 0;
  const bool is_known = !fails && strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *found = is_known ? reinterpret_cast<void*>(cuTensorMapEncodeTiled) : nullptr;
  *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- launching: `kernel<<<grid, block>>>(x, y)` is rewritten to `kernel ->* EmulatedLaunch(grid, block)(x, y)` ------

template <typename Closure>
struct EmulatedCall {
  emulation::Grid grid;
  Closure closure;
};

struct EmulatedLaunch {
  emulation::Grid grid;

  EmulatedLaunch(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t = nullptr) : grid{grid, block, 1, shared} {}

  template <typename... Arguments>
  auto operator()(Arguments... arguments) const {
    const auto closure = [=](auto kernel) { kernel(arguments...); };
    return EmulatedCall<decltype(closure)>{grid, closure};
  }
};

template <typename... Parameters, typename Closure>
void operator->*(void (*kernel)(Parameters...), const EmulatedCall<Closure>& call) {
  const auto is_good = [](dim3 size, uint64_t most, uint64_t most_beside) {
    return size.count() != 0 && size.x <= most && size.y <= most_beside && size.z <= most_beside;
  };
  const auto& [grid, block, cluster, shared_bytes] = call.grid;
  const bool good_block =
      is_good(block, emulation::kMostThreads, emulation::kMostThreads) && block.count() <= emulation::kMostThreads;
  if (!good_block || !is_good(grid, 0x7FFFFFFF, 0xFFFF)) {
    emulation_last_error = cudaErrorInvalidConfiguration;
  } else if (shared_bytes > emulation_limits(kernel).dynamic_shared) {
    emulation_last_error = cudaErrorInvalidValue;
  } else if (cluster == 0 || cluster > emulation_limits(kernel).cluster || grid.x % cluster != 0) {
    emulation_last_error = cudaErrorInvalidClusterSize;
  } else if (!emulation::failed()) {
    const auto run = [&] { call.closure(kernel); };
    const auto erased = [](const void* closure) { (*static_cast<decltype(run)*>(closure))(); };
    emulation::run_grid(call.grid, erased, &run);
  }
  if (emulation::failed()) emulation_last_error = cudaErrorLaunchFailure;
}

// ---- launching with attributes --------------------------------------------------------------------------------------

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension, cudaLaunchAttributeProgrammaticStreamSerialization };

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    uint3 clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  EmulatedLaunch launch(config->gridDim, config->blockDim, config->dynamicSmemBytes);
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id != cudaLaunchAttributeClusterDimension) continue;
    const uint3 cluster = config->attrs[i].val.clusterDim;
    if (cluster.y != 1 || cluster.z != 1) return cudaErrorInvalidClusterSize;  // csrc has only clusters along x
    launch.grid.cluster = cluster.x;
  }
  kernel->*launch(arguments...);
  return cudaGetLastError();
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel, const cudaLaunchConfig_t*) {
  *clusters = 2;
  return cudaSuccess;
}
