// A `ScaleSource` as a kernel's parameter, and the scale that each thread computes from it.
#pragma once

#include <cmath>

#include "../scale_source.h"
#include "fp8.cuh"

namespace jax_fp8 {

struct DeviceScaleSource {
  const float* element;  // a scale, or an amax
  float* used;           // where the kernel stores the scale
  AmaxRule rule;
  bool from_amax;
};

inline DeviceScaleSource on_device(const ScaleSource& source, float* used) {
  const ScaleRule& rule = source.rule;
  return {
      .element = source.array + rule.row,
      .used = used,
      .rule = {std::ldexp(1.0f, rule.margin), rule.amax_epsilon, rule.power_2_scale},
      .from_amax = rule.from_amax,
  };
}

// 1 / scale. The scale takes a few instructions, so every thread computes it, and the first thread of the grid stores
// it. Like multiplier_of, call it after the loads of x. `loaded` is the source's element, whose load comes before them.
template <Fp8Type kFormat>
__device__ inline float multiplier_from(float loaded, const DeviceScaleSource& source) {
  const float scale = source.from_amax ? scale_from_amax<kFormat>(loaded, source.rule) : loaded;
  if (blockIdx.x == 0 && threadIdx.x == 0) *source.used = scale;
  return multiplier_of(scale);
}

}  // namespace jax_fp8
