// The scale of a tensor, found by the kernel that quantizes it.
#pragma once

#include <cmath>

#include "../scale_origin.h"
#include "fp8.cuh"

namespace jax_fp8 {

struct ScaleInput {
  const float* source;  // a scale, or an amax
  float* used;          // where the scale goes
  AmaxRule rule;
  bool from_amax;
};

inline ScaleInput scale_input(const float* source, const ScaleOrigin& origin, float* used) {
  return {
      .source = source + origin.row,
      .used = used,
      .rule = {std::ldexp(1.0f, origin.margin), origin.amax_epsilon, origin.power_2_scale},
      .from_amax = origin.from_amax,
  };
}

// The scale is a few instructions, and so every thread computes it; the first one of the grid also writes it down.
// Call it, like multiplier_of, after the loads of x; `loaded` is what was read of the source before them.
template <Fp8Type kFormat>
__device__ inline float multiplier_from(float loaded, const ScaleInput& input) {
  const float scale = input.from_amax ? scale_from_amax<kFormat>(loaded, input.rule) : loaded;
  if (blockIdx.x == 0 && threadIdx.x == 0) *input.used = scale;
  return multiplier_of(scale);
}

}  // namespace jax_fp8
