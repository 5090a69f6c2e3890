// One pass that reads x once, 16 bytes at a time. A thread issues 128 bytes of loads before it needs the first, so that
// enough of them are in flight to hide the latency of memory.
#include "amax.h"
#include "device/by_dtype.cuh"
#include "device/reduce.cuh"
#include "device/vector.cuh"
#include "launch.h"

namespace jax_fp8 {
namespace {

constexpr int kThreads = 256;

template <typename T>
constexpr int kVectorsPerThread = 16 / sizeof(T);

template <typename T>
constexpr int64_t kChunk = int64_t{kThreads} * kVectorWidth * kVectorsPerThread<T>;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const T* __restrict__ x, int64_t count, bool aligned, float* amax) {
  const int64_t start = blockIdx.x * kChunk<T>;
  float thread_amax = 0.0f;
  if (aligned && start + kChunk<T> <= count) {
    float elements[kVectorsPerThread<T>][kVectorWidth];
#pragma unroll
    for (int v = 0; v < kVectorsPerThread<T>; ++v) {
      unpack(load_vector(x + start + (v * kThreads + threadIdx.x) * kVectorWidth), elements[v]);
    }
#pragma unroll
    for (int v = 0; v < kVectorsPerThread<T>; ++v) thread_amax = amax_of(thread_amax, elements[v]);
  } else {
    const int64_t end = min(start + kChunk<T>, count);
    for (int64_t i = start + threadIdx.x; i < end; i += kThreads) thread_amax = amax_of(thread_amax, to_float(x[i]));
  }
  merge_amax<kThreads>(thread_amax, amax);
}

}  // namespace

cudaError_t launch_amax(const AmaxArguments& arguments, cudaStream_t stream) {
  const cudaError_t cleared =
      arguments.further ? cudaSuccess : cudaMemsetAsync(arguments.amax, 0, sizeof(float), stream);
  if (cleared != cudaSuccess || arguments.count == 0) return cleared;
  const bool aligned = are_aligned({arguments.x});
  by_dtype(arguments.source, [&](auto element) {
    using T = decltype(element);
    const auto blocks = static_cast<unsigned>(divide_up(arguments.count, kChunk<T>));
    amax_kernel<T><<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(arguments.x), arguments.count, aligned,
                                                    arguments.amax);
  });
  return cudaGetLastError();
}

}  // namespace jax_fp8
