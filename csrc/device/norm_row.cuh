// The norm of a few rows, each by a block of its own: text generation normalizes one row of each prompt. A row is in
// registers, so it is read once. The transpose, which text generation does not need, is written byte by byte.
//
//     [1, 2048]: a load for each of 256 threads, and two sums over the block
#pragma once

#include <cstdint>

#include "fp8.cuh"
#include "norm.cuh"
#include "norm_parts.cuh"
#include "reduce.cuh"
#include "scale_source.cuh"
#include "vector.cuh"

namespace jax_fp8::norm {

constexpr int kRowThreads = 256;
constexpr int kRowVectors = 4;  // of a thread
constexpr int64_t kMostRowCols = int64_t{kRowThreads} * kRowVectors * kVectorWidth;
constexpr int64_t kMostSingleRows = 128;  // with more, blocks of several rows read the parameters less often

// Cols are a multiple of 8, at most kMostRowCols, and pointers multiples of 16 bytes.
template <typename T, Fp8Type kFormat>
__global__ void __launch_bounds__(kRowThreads) row_kernel(Rows<T> input, DeviceScaleSource scale, NormResults results) {
  __shared__ float scratch[2][kWarp][1];
  const bool casts = quantizes(scale);
  const float loaded = casts ? __ldg(scale.element) : 0.0f;
  const int64_t row = blockIdx.x;
  const int cols = static_cast<int>(input.cols);
  const auto col_of = [](int v) { return (v * kRowThreads + static_cast<int>(threadIdx.x)) * kVectorWidth; };
  float x[kRowVectors][kVectorWidth], sums[1] = {0.0f}, squares[1] = {0.0f};
  Vector<T> vectors[kRowVectors];
  Vector<float> norm_scales[kRowVectors], norm_biases[kRowVectors];
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
    if (col_of(v) >= cols) break;
    vectors[v] = load_vector(input.x + row * cols + col_of(v));
    norm_scales[v] = load_vector(input.norm_scale + col_of(v));
    if (input.norm_bias != nullptr) norm_biases[v] = load_vector(input.norm_bias + col_of(v));
  }
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
    if (col_of(v) >= cols) break;
    unpack(vectors[v], x[v]);
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) sums[0] = __fadd_rn(sums[0], x[v][j]);
  }
  float mean = 0.0f;
  if (input.norm_bias != nullptr) {
    block_sums(sums, scratch[0]);
    mean = mean_of(sums[0], cols);
  }
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
    if (col_of(v) >= cols) break;
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) squares[0] = add_square(squares[0], __fsub_rn(x[v][j], mean));
  }
  block_sums(squares, scratch[1]);
  const float rstd = rstd_of(squares[0], cols, input.epsilon);
  if (threadIdx.x == 0) {
    if (results.mean != nullptr) results.mean[row] = mean;
    if (results.rstd != nullptr) results.rstd[row] = rstd;
  }
  const float multiplier = casts ? multiplier_from<kFormat>(loaded, scale) : 0.0f;
  float thread_amax = 0.0f;
#pragma unroll
  for (int v = 0; v < kRowVectors; ++v) {
    if (col_of(v) >= cols) break;
    float norm_scale[kVectorWidth], norm_bias[kVectorWidth];
    unpack(norm_scales[v], norm_scale);
    if (input.norm_bias != nullptr) unpack(norm_biases[v], norm_bias);
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) {
      const float bias = input.norm_bias != nullptr ? norm_bias[j] : kNoBias;
      x[v][j] = normalized(x[v][j], mean, rstd, norm_scale[j], bias);
    }
    round_all<T>(x[v]);
    thread_amax = amax_of(thread_amax, x[v]);
    const uint2 bytes = {quantize_four<kFormat>(x[v], multiplier), quantize_four<kFormat>(x[v] + 4, multiplier)};
    if (results.values != nullptr) *reinterpret_cast<uint2*>(results.values + row * cols + col_of(v)) = bytes;
    if (results.values_t == nullptr) continue;
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) {
      const uint32_t four = j < 4 ? bytes.x : bytes.y;
      results.values_t[(col_of(v) + j) * input.rows + row] = static_cast<uint8_t>(four >> (j % 4 * 8));
    }
  }
  merge_amax<kRowThreads>(thread_amax, results.amax);
}

}  // namespace jax_fp8::norm
