// A norm as the producer of the cast by tiles, device/quantize_by_tile.cuh. The usual shapes go to
// device/norm_cluster_by_tile.cuh instead.
//
// The statistics need the whole row before any element can be normalized, and a scale needs its whole tile before any
// element can be cast. So the kernels that otherwise compute only the amax compute the statistics first, and the cast
// reads x a second time: for 16-bit x, 6 bytes of traffic for each element instead of 4.
#pragma once

#include <cstdint>

#include "norm.cuh"
#include "tile.cuh"
#include "vector.cuh"

namespace jax_fp8::norm {

template <typename T>
struct Normalized {
  using Element = T;
  static constexpr int kInputs = 1, kParts = 1, kCompanions = 0;
  static constexpr int kTileBlocks = sizeof(T) == 4 ? 2 : 3;
  static constexpr bool kSums = false;

  Rows<T> input;
  const float* mean;  // [rows, 1]; nullptr: RMSNorm
  const float* rstd;  // [rows, 1]

  __device__ float mean_of_row(int64_t row) const { return mean != nullptr ? __ldg(mean + row) : 0.0f; }

  __device__ void load(int64_t row, int64_t col, int64_t width, Vector<T> (&loaded)[1]) const {
    loaded[0] = load_vector(input.x + row * width + col);
  }

  template <int kPatch>
  __device__ void make(int64_t row, int64_t col, const Vector<T> (&loaded)[kPatch][1],
                       Vector<T> (&made)[kPatch][1]) const {
    float norm_scale[kVectorWidth], norm_bias[kVectorWidth];
    unpack(load_vector(input.norm_scale + col), norm_scale);
    load_bias(input.norm_bias, static_cast<int>(col), norm_bias);
#pragma unroll
    for (int r = 0; r < kPatch; ++r) {
      const float row_mean = mean_of_row(row + r), row_rstd = __ldg(rstd + row + r);
      float x[kVectorWidth];
      unpack(loaded[r][0], x);
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) x[j] = normalized(x[j], row_mean, row_rstd, norm_scale[j], norm_bias[j]);
      pack(x, made[r][0]);
    }
  }

  __device__ void element(int64_t row, int64_t col, int64_t width, float (&made)[1]) const {
    const float norm_bias = input.norm_bias != nullptr ? __ldg(input.norm_bias + col) : kNoBias;
    const float x = to_float(input.x[row * width + col]);
    made[0] = to_float(from_float<T>(
        normalized(x, mean_of_row(row), __ldg(rstd + row), __ldg(input.norm_scale + col), norm_bias)));
  }
};

}  // namespace jax_fp8::norm
