// Activations and their gradients as producers for the two kernels that cast and transpose: device/quantize_tile.cuh
// with one scale for the tensor, device/quantize_by_tile.cuh with one scale for each tile.
#include "activation.h"
#include "device/activation.cuh"
#include "device/by_dtype.cuh"
#include "device/quantize_by_tile.cuh"
#include "device/quantize_tile.cuh"
#include "launch.h"

namespace jax_fp8 {
namespace {

// ---- the rule of each, element by element ---------------------------------------------------------------------------
//
// A rule maps the inputs of one element to the parts of the result. A gradient's rule also returns the activated
// element as the companion (device/quantize_tile.cuh), which is written transposed only. A weight of the row multiplies
// dy, and the activated element, which is always the last.

struct Forward {
  static constexpr bool kGated = false, kSums = false;
  static constexpr int kInputs = 1, kParts = 1, kCompanions = 0;  // x -> y

  template <typename Function>
  __device__ static void apply(Function function, const float (&in)[1], float (&out)[1]) {
    out[0] = function.value(in[0]);
  }
};

struct GatedForward {
  static constexpr bool kGated = true, kSums = false;
  static constexpr int kInputs = 2, kParts = 1, kCompanions = 0;  // gate, linear -> y

  template <typename Function>
  __device__ static void apply(Function function, const float (&in)[2], float (&out)[1]) {
    out[0] = function.value(in[0]) * in[1];
  }
};

struct Backward {
  static constexpr bool kGated = false, kSums = true;
  static constexpr int kInputs = 2, kParts = 1, kCompanions = 1;  // x, dy -> dx; y

  template <typename Function>
  __device__ static void apply(Function function, const float (&in)[2], float (&out)[2]) {
    out[0] = function.gradient(in[1], in[0]);
    out[1] = function.value(in[0]);
  }
};

struct GatedBackward {
  static constexpr bool kGated = true, kSums = true;
  static constexpr int kInputs = 3, kParts = 2, kCompanions = 1;  // gate, linear, dy -> dgate, dlinear; y

  template <typename Function>
  __device__ static void apply(Function function, const float (&in)[3], float (&out)[3]) {
    const float value = function.value(in[0]);
    out[0] = function.gradient(in[2] * in[1], in[0]);
    out[1] = in[2] * value;
    out[2] = value * in[1];
  }
};

// ---- the producer of each -------------------------------------------------------------------------------------------

template <typename T, typename Rule>
struct Activated {
  using Element = T;
  static constexpr int kInputs = Rule::kInputs;
  static constexpr int kParts = Rule::kParts;
  static constexpr int kCompanions = Rule::kCompanions;
  static constexpr int kMade = kParts + kCompanions;
  static constexpr bool kSums = Rule::kSums;
  static constexpr int kHalves = Rule::kGated ? 2 : 1;
  // A thread holds 32 elements of each input in registers, and these blocks of 256 threads share a multiprocessor: at
  // least 80 KB of loads are in flight.
  static constexpr int kLoaded = kInputs * sizeof(T);
  static constexpr int kAmaxBlocks = kLoaded <= 2 ? 5 : kLoaded <= 4 ? 4 : kLoaded <= 6 ? 3 : 2;
  // A companion needs registers too, so fewer blocks fit.
  static constexpr int kBlocks = kLoaded <= 6 ? kAmaxBlocks - kCompanions : kAmaxBlocks;
  // By tiles a thread holds 64 elements, and parts and companion stay in registers until their scales are known.
  static constexpr int kHeld = (kInputs > kMade ? kInputs : kMade) * sizeof(T);
  static constexpr int kTileBlocks = kHeld <= 2 ? 4 : kHeld <= 6 ? 2 : 1;

  const T* x;                // [rows, kHalves * width]
  const T* dy;               // [rows, width]
  const float* row_weights;  // [rows], or null
  int64_t rows;
  Activation activation;

  // Inputs in order: the halves of x, then dy.
  __device__ const T* address(int input, int64_t row, int64_t col, int64_t width) const {
    return input < kHalves ? x + (row * kHalves + input) * width + col : dy + row * width + col;
  }

  __device__ void load(int64_t row, int64_t col, int64_t width, Vector<T> (&loaded)[kInputs]) const {
#pragma unroll
    for (int input = 0; input < kInputs; ++input) loaded[input] = load_vector(address(input, row, col, width));
  }

  // By tiles a block may also make rows past the last one, of zeros.
  __device__ float weight(int64_t row) const { return row_weights && row < rows ? __ldg(row_weights + row) : 1.0f; }

  template <typename Function>
  __device__ static void make_element(Function function, float weight, float (&in)[kInputs], float (&out)[kMade]) {
    if constexpr (kInputs > kHalves) in[kHalves] *= weight;
    Rule::apply(function, in, out);
    out[kMade - 1] *= weight;
  }

  template <int kRows>
  __device__ void make(int64_t row, int64_t, const Vector<T> (&loaded)[kRows][kInputs],
                       Vector<T> (&made)[kRows][kMade]) const {
    with_activation<T, Rule::kGated>(activation, [&](auto function) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) make_vectors(function, weight(row + r), loaded[r], made[r]);
    });
  }

  template <typename Function>
  __device__ static void make_vectors(Function function, float weight, const Vector<T> (&loaded)[kInputs],
                                      Vector<T> (&made)[kMade]) {
    float in[kInputs][kVectorWidth], out[kMade][kVectorWidth];
#pragma unroll
    for (int input = 0; input < kInputs; ++input) unpack(loaded[input], in[input]);
#pragma unroll
    for (int i = 0; i < kVectorWidth; ++i) {
      float element_in[kInputs], element_out[kMade];
#pragma unroll
      for (int input = 0; input < kInputs; ++input) element_in[input] = in[input][i];
      make_element(function, weight, element_in, element_out);
#pragma unroll
      for (int m = 0; m < kMade; ++m) out[m][i] = element_out[m];
    }
#pragma unroll
    for (int m = 0; m < kMade; ++m) pack(out[m], made[m]);
  }

  __device__ void element(int64_t row, int64_t col, int64_t width, float (&made)[kMade]) const {
    float in[kInputs];
#pragma unroll
    for (int input = 0; input < kInputs; ++input) in[input] = to_float(*address(input, row, col, width));
    with_activation<T, Rule::kGated>(activation,
                                     [&](auto function) { make_element(function, weight(row), in, made); });
#pragma unroll
    for (int m = 0; m < kMade; ++m) made[m] = to_float(from_float<T>(made[m]));
  }
};

// ---- the amax alone: the same tiles, nothing written ----------------------------------------------------------------

template <typename Producer>
__global__ void __launch_bounds__(quantize_tile::kThreads, Producer::kAmaxBlocks)
    amax_tile_kernel(Producer producer, int64_t rows, int64_t width, unsigned tiles_per_row, float* amax) {
  using namespace quantize_tile;
  const int64_t row = int64_t{blockIdx.x / tiles_per_row} * kRows + threadIdx.x / kGroups * kPatchRows;
  const int64_t col = int64_t{blockIdx.x % tiles_per_row} * kCols + threadIdx.x % kGroups * kVectorWidth;
  float thread_amax = 0.0f;
  if (row < rows && col < width) {
    Vector<typename Producer::Element> loaded[kPatchRows][Producer::kInputs], made[kPatchRows][Producer::kMade];
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) producer.load(row + r, col, width, loaded[r]);
    producer.make(row, col, loaded, made);
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
#pragma unroll
      for (int part = 0; part < Producer::kParts; ++part) {
        float elements[kVectorWidth];
        unpack(made[r][part], elements);
        thread_amax = amax_of(thread_amax, elements);
      }
    }
  }
  merge_amax<kThreads>(thread_amax, amax);
}

template <typename Producer>
__global__ void __launch_bounds__(quantize_tile::kThreads)
    amax_any_kernel(Producer producer, int64_t rows, int64_t width, unsigned tiles_per_row, float* amax) {
  using namespace quantize_tile;
  const int64_t tile_row = int64_t{blockIdx.x / tiles_per_row} * kRows;
  const int64_t col = int64_t{blockIdx.x % tiles_per_row} * kAnyCols + threadIdx.x % kAnyCols;
  float thread_amax = 0.0f;
  for (int r = threadIdx.x / kAnyCols; r < kRows && tile_row + r < rows && col < width; r += kAnyRowsAtOnce) {
    float made[Producer::kMade];
    producer.element(tile_row + r, col, width, made);
#pragma unroll
    for (int part = 0; part < Producer::kParts; ++part) thread_amax = amax_of(thread_amax, made[part]);
  }
  merge_amax<kThreads>(thread_amax, amax);
}

// ---- launching ------------------------------------------------------------------------------------------------------

// Calls launch(producer) with the producer for these inputs: `Plain` or `Gated` is its rule.
template <typename T, typename Plain, typename Gated, typename Launch>
void with_producer(const ActivationInputs& inputs, Launch launch) {
  const T* x = static_cast<const T*>(inputs.x);
  const T* dy = static_cast<const T*>(inputs.dy);
  if (inputs.gated) {
    launch(Activated<T, Gated>{x, dy, inputs.row_weights, inputs.rows, inputs.activation});
  } else {
    launch(Activated<T, Plain>{x, dy, inputs.row_weights, inputs.rows, inputs.activation});
  }
}

template <typename Plain, typename Gated>
cudaError_t launch_quantize_activated(const ActivationArguments& arguments, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(arguments.amax, 0, sizeof(float), stream);
  if (cleared != cudaSuccess) return cleared;
  const ActivationInputs& inputs = arguments.inputs;
  const bool aligned = are_aligned({inputs.x, inputs.dy, arguments.values, arguments.values_t, arguments.activated_t});
  const DeviceScaleSource scale = on_device(arguments.source, arguments.scale);
  const TiledResults results{
      .values = arguments.values,
      .values_t = arguments.values_t,
      .amax = arguments.amax,
      .sums = arguments.sums,
      .companion = {arguments.activated_scale, arguments.activated_format, arguments.activated_t},
      .rows = inputs.rows,
      .width = inputs.width,
  };
  by_dtype(inputs.type, arguments.format, [&](auto element, auto format) {
    with_producer<decltype(element), Plain, Gated>(inputs, [&](auto producer) {
      launch_quantize_tiles<decltype(format)::value>(producer, scale, results, aligned, stream);
    });
  });
  return cudaGetLastError();
}

template <typename Plain, typename Gated>
cudaError_t launch_activated_by_tile(const ActivationByTileArguments& arguments, cudaStream_t stream) {
  const ActivationInputs& inputs = arguments.inputs;
  const TileCast& cast = arguments.cast;
  cudaError_t status = cudaMemsetAsync(cast.amax, 0, sizeof(float), stream);
  if (status != cudaSuccess) return status;
  const bool aligned = are_aligned({inputs.x, inputs.dy, cast.values, cast.values_t, arguments.activated_t});
  const ByTileResults results{
      .cast = cast,
      .sums = arguments.sums,
      .companion = {arguments.activated_t, arguments.activated_scales_t},
      .rows = inputs.rows,
      .width = inputs.width,
  };
  by_dtype(inputs.type, [&](auto element) {
    with_producer<decltype(element), Plain, Gated>(
        inputs, [&](auto producer) { status = launch_by_tile(producer, results, aligned, stream); });
  });
  return status;
}

template <typename Plain, typename Gated>
cudaError_t launch_amax_of_activated(const ActivationInputs& inputs, float* amax, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(amax, 0, sizeof(float), stream);
  if (cleared != cudaSuccess || inputs.rows * inputs.width == 0) return cleared;
  const bool aligned = are_aligned({inputs.x, inputs.dy});
  by_dtype(inputs.type, [&](auto element) {
    with_producer<decltype(element), Plain, Gated>(inputs, [&](auto producer) {
      using Producer = decltype(producer);
      const bool vectorized = aligned && inputs.rows % 16 == 0 && inputs.width % 16 == 0;
      const auto kernel = vectorized ? amax_tile_kernel<Producer> : amax_any_kernel<Producer>;
      const int64_t tiles_per_row =
          divide_up(inputs.width, vectorized ? quantize_tile::kCols : quantize_tile::kAnyCols);
      const int64_t tiles = divide_up(inputs.rows, quantize_tile::kRows) * tiles_per_row;
      kernel<<<static_cast<unsigned>(tiles), quantize_tile::kThreads, 0, stream>>>(
          producer, inputs.rows, inputs.width, static_cast<unsigned>(tiles_per_row), amax);
    });
  });
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_activation_quantize(const ActivationArguments& arguments, cudaStream_t stream) {
  return launch_quantize_activated<Forward, GatedForward>(arguments, stream);
}

cudaError_t launch_activation_backward_quantize(const ActivationArguments& arguments, cudaStream_t stream) {
  return launch_quantize_activated<Backward, GatedBackward>(arguments, stream);
}

cudaError_t launch_activation_quantize_by_tile(const ActivationByTileArguments& arguments, cudaStream_t stream) {
  return launch_activated_by_tile<Forward, GatedForward>(arguments, stream);
}

cudaError_t launch_activation_backward_quantize_by_tile(const ActivationByTileArguments& arguments,
                                                        cudaStream_t stream) {
  return launch_activated_by_tile<Backward, GatedBackward>(arguments, stream);
}

cudaError_t launch_activation_amax(const ActivationInputs& inputs, float* amax, cudaStream_t stream) {
  return launch_amax_of_activated<Forward, GatedForward>(inputs, amax, stream);
}

cudaError_t launch_activation_backward_amax(const ActivationInputs& inputs, float* amax, cudaStream_t stream) {
  return launch_amax_of_activated<Backward, GatedBackward>(inputs, amax, stream);
}

}  // namespace jax_fp8
