// The cast of a flat array, and the producer of a matrix as it is for the two kernels that cast and transpose:
// device/quantize_tile.cuh with one scale for the tensor, device/quantize_by_tile.cuh with one scale for each tile.
#include "device/by_dtype.cuh"
#include "device/fp8.cuh"
#include "device/quantize_by_tile.cuh"
#include "device/quantize_tile.cuh"
#include "device/reduce.cuh"
#include "device/scale_source.cuh"
#include "device/vector.cuh"
#include "launch.h"
#include "quantize.h"

namespace jax_fp8 {
namespace {

// ---- flat ----------------------------------------------------------------------------------------------------------

constexpr int kFlatThreads = 256;

// The vectors of a thread: 64 bytes in flight. Of a small array one, so that more blocks share it.
template <typename T>
constexpr int kManyVectors = 8 / sizeof(T);
constexpr int64_t kFewElements = 1 << 17;

template <int kVectors>
constexpr int64_t kChunk = int64_t{kFlatThreads} * kVectorWidth * kVectors;

template <typename T, Fp8Type kFormat, int kVectors>
__global__ void __launch_bounds__(kFlatThreads)
    quantize_kernel(const T* __restrict__ x, DeviceScaleSource scale, int64_t count, bool aligned,
                    uint8_t* __restrict__ values, float* amax) {
  const float loaded = __ldg(scale.element);
  const int64_t start = blockIdx.x * kChunk<kVectors>;
  float thread_amax = 0.0f;
  if (aligned && start + kChunk<kVectors> <= count) {
    float elements[kVectors][kVectorWidth];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      unpack(load_vector(x + start + (v * kFlatThreads + threadIdx.x) * kVectorWidth), elements[v]);
    }
    const float multiplier = multiplier_from<kFormat>(loaded, scale);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      thread_amax = amax_of(thread_amax, elements[v]);
      const uint2 bytes = {quantize_four<kFormat>(elements[v], multiplier),
                           quantize_four<kFormat>(elements[v] + 4, multiplier)};
      *reinterpret_cast<uint2*>(values + start + (v * kFlatThreads + threadIdx.x) * kVectorWidth) = bytes;
    }
  } else {
    const float multiplier = multiplier_from<kFormat>(loaded, scale);
    const int64_t end = min(start + kChunk<kVectors>, count);
    for (int64_t i = start + threadIdx.x; i < end; i += kFlatThreads) {
      const float element = to_float(x[i]);
      thread_amax = amax_of(thread_amax, element);
      values[i] = quantize_one<kFormat>(element, multiplier);
    }
  }
  merge_amax<kFlatThreads>(thread_amax, amax);
}

// ---- by tiles ------------------------------------------------------------------------------------------------------

template <typename T, bool kSummed>
struct AsItIs {
  using Element = T;
  static constexpr int kInputs = 1;
  static constexpr int kParts = 1;
  static constexpr int kCompanions = 0;
  // So many blocks keep 80 KB of 16-bit x in flight on a multiprocessor, or 128 KB of float32.
  static constexpr int kBlocks = sizeof(T) == 4 ? 4 : 5;
  static constexpr int kTileBlocks = sizeof(T) == 4 ? 2 : kSummed ? 3 : 4;
  static constexpr bool kSums = kSummed;

  Matrices matrices;

  __device__ const T* at(int64_t row, int64_t col) const {
    const void* x = matrices.x[0];
    int64_t start = 0, end = matrices.ends[0];
#pragma unroll
    for (int i = 1; i < kMaxMatrices; ++i) {
      if (col >= matrices.ends[i - 1]) x = matrices.x[i], start = matrices.ends[i - 1], end = matrices.ends[i];
    }
    return static_cast<const T*>(x) + row * (end - start) + (col - start);
  }

  __device__ void load(int64_t row, int64_t col, int64_t, Vector<T> (&loaded)[1]) const {
    loaded[0] = load_vector(at(row, col));
  }

  template <int kRows>
  __device__ void make(int64_t, int64_t, const Vector<T> (&loaded)[kRows][1], Vector<T> (&made)[kRows][1]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) made[r][0] = loaded[r][0];
  }

  __device__ void element(int64_t row, int64_t col, int64_t, float (&made)[1]) const {
    made[0] = to_float(*at(row, col));
  }
};

// Whether every vector lies within one matrix and starts at a multiple of 16 bytes.
bool are_vectorized(const Matrices& matrices) {
  for (int i = 0; i < kMaxMatrices; ++i) {
    if (!are_aligned({matrices.x[i]}) || matrices.ends[i] % 16 != 0) return false;
  }
  return true;
}

}  // namespace

cudaError_t launch_quantize(const QuantizeArguments& arguments, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(arguments.amax, 0, sizeof(float), stream);
  if (cleared != cudaSuccess) return cleared;
  const int64_t count = arguments.rows * arguments.cols;
  const bool aligned = are_aligned({arguments.x.x[0], arguments.values});
  const DeviceScaleSource scale = on_device(arguments.source, arguments.scale);
  by_dtype(arguments.x_type, arguments.format, [&](auto element, auto format) {
    using T = decltype(element);
    constexpr Fp8Type kFormat = decltype(format)::value;
    const auto launch = [&](auto kernel, int64_t chunk) {
      // An empty x has a scale too: one block runs and writes it.
      const auto blocks = static_cast<unsigned>(count ? divide_up(count, chunk) : 1);
      kernel<<<blocks, kFlatThreads, 0, stream>>>(static_cast<const T*>(arguments.x.x[0]), scale, count, aligned,
                                                  arguments.values, arguments.amax);
    };
    count <= kFewElements ? launch(quantize_kernel<T, kFormat, 1>, kChunk<1>)
                          : launch(quantize_kernel<T, kFormat, kManyVectors<T>>, kChunk<kManyVectors<T>>);
  });
  return cudaGetLastError();
}

cudaError_t launch_quantize_transpose(const QuantizeArguments& arguments, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(arguments.amax, 0, sizeof(float), stream);
  if (cleared != cudaSuccess) return cleared;
  const bool aligned = are_vectorized(arguments.x) && are_aligned({arguments.values, arguments.values_t});
  const DeviceScaleSource scale = on_device(arguments.source, arguments.scale);
  const TiledResults results{
      .values = arguments.values,
      .values_t = arguments.values_t,
      .amax = arguments.amax,
      .sums = arguments.sums,
      .rows = arguments.rows,
      .width = arguments.cols,
  };
  by_dtype(arguments.x_type, arguments.format, [&](auto element, auto format) {
    using T = decltype(element);
    const auto launch = [&](auto producer) {
      launch_quantize_tiles<decltype(format)::value>(producer, scale, results, aligned, stream);
    };
    arguments.sums.result ? launch(AsItIs<T, true>{arguments.x}) : launch(AsItIs<T, false>{arguments.x});
  });
  return cudaGetLastError();
}

cudaError_t launch_quantize_by_tile(const QuantizeByTileArguments& arguments, cudaStream_t stream) {
  const TileCast& cast = arguments.cast;
  cudaError_t status = cudaMemsetAsync(cast.amax, 0, sizeof(float), stream);
  if (status != cudaSuccess) return status;
  const bool aligned = are_vectorized(arguments.x) && are_aligned({cast.values, cast.values_t});
  const ByTileResults results{
      .cast = cast,
      .sums = arguments.sums,
      .companion = {},
      .rows = arguments.rows,
      .width = arguments.cols,
  };
  by_dtype(arguments.x_type, [&](auto element) {
    using T = decltype(element);
    const auto launch = [&](auto producer) { status = launch_by_tile(producer, results, aligned, stream); };
    arguments.sums.result ? launch(AsItIs<T, true>{arguments.x}) : launch(AsItIs<T, false>{arguments.x});
  });
  return status;
}

}  // namespace jax_fp8
