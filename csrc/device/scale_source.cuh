// A `ScaleSource` as a kernel takes it, and the scale that each thread makes of it.
#pragma once

#include <cmath>

#include "../scale_source.h"
#include "fp8.cuh"

namespace jax_fp8 {

struct DeviceScaleSource {
  const float* element;  // a scale, or an amax
  float* used;           // where the scale goes
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

// The scale is a few instructions, and so every thread computes it; the first one of the grid also writes it down.
// Call it, like multiplier_of, after the loads of x; `loaded` is the element, read before them.
template <Fp8Type kFormat>
__device__ inline float multiplier_from(float loaded, const DeviceScaleSource& source) {
  const float scale = source.from_amax ? scale_from_amax<kFormat>(loaded, source.rule) : loaded;
  if (blockIdx.x == 0 && threadIdx.x == 0) *source.used = scale;
  return multiplier_of(scale);
}

}  // namespace jax_fp8
