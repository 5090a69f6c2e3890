// The part of CUDA that the kernels of csrc use, for a C++ compiler: keywords, vectors, the runtime's calls.
//
// It is found in place of CUDA's header of this name. What a kernel uses and this lacks is an error of the compiler: add it here,
// to intrinsics.h, to warp.h or, when it is an instruction of PTX, to instructions.h.
#pragma once

#include <utility>

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

// ---- vectors: as strictly aligned as CUDA's ---------------------------------------------------------------------------------

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

// ---- the runtime ----------------------------------------------------------------------------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
};

using cudaStream_t = struct CUstream_st*;

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };

inline cudaError_t emulation_last_error = cudaSuccess;

inline cudaError_t cudaGetLastError() { return std::exchange(emulation_last_error, cudaSuccess); }
inline cudaError_t cudaPeekAtLastError() { return emulation_last_error; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }

inline cudaError_t cudaMemsetAsync(void* target, int byte, size_t count, cudaStream_t = nullptr) {
  memset(target, byte, count);
  return cudaSuccess;
}

// How much dynamic shared memory a kernel may have: more than 48 KB it must ask for.
template <typename... Parameters>
size_t& emulation_dynamic_limit(void (*kernel)(Parameters...)) {
  static struct {
    void (*kernel)(Parameters...);
    size_t limit;
  } limits[64];
  for (auto& entry : limits) {
    if (entry.kernel == nullptr) entry = {kernel, 48 * 1024};
    if (entry.kernel == kernel) return entry.limit;
  }
  abort();
}

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<size_t>(value) > emulation::kMostShared) return cudaErrorInvalidValue;
  emulation_dynamic_limit(kernel) = value;
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 4 : static_cast<int>(emulation::kMostShared);
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

// ---- launching: `kernel<<<grid, block>>>(x, y)` is rewritten to `kernel ->* EmulatedLaunch(grid, block)(x, y)` -------------------

template <typename Closure>
struct EmulatedCall {
  dim3 grid, block;
  size_t shared;
  Closure closure;
};

struct EmulatedLaunch {
  dim3 grid, block;
  size_t shared;

  EmulatedLaunch(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t = nullptr) : grid(grid), block(block), shared(shared) {}

  template <typename... Arguments>
  auto operator()(Arguments... arguments) const {
    const auto closure = [=](auto kernel) { kernel(arguments...); };
    return EmulatedCall<decltype(closure)>{grid, block, shared, closure};
  }
};

template <typename... Parameters, typename Closure>
void operator->*(void (*kernel)(Parameters...), const EmulatedCall<Closure>& call) {
  const auto is_good = [](dim3 size, uint64_t most, uint64_t most_beside) {
    return size.count() != 0 && size.x <= most && size.y <= most_beside && size.z <= most_beside;
  };
  const bool good_block = is_good(call.block, emulation::kMostThreads, emulation::kMostThreads) &&
                          call.block.count() <= emulation::kMostThreads;
  if (!good_block || !is_good(call.grid, 0x7FFFFFFF, 0xFFFF)) {
    emulation_last_error = cudaErrorInvalidConfiguration;
  } else if (call.shared > emulation_dynamic_limit(kernel)) {
    emulation_last_error = cudaErrorInvalidValue;
  } else if (!emulation::failed()) {
    const auto run = [&] { call.closure(kernel); };
    const auto erased = [](const void* closure) { (*static_cast<decltype(run)*>(closure))(); };
    emulation::run_grid(call.grid, call.block, call.shared, erased, &run);
  }
  if (emulation::failed()) emulation_last_error = cudaErrorLaunchFailure;
}
