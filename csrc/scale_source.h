// Where a kernel that quantizes finds its scale. jax_fp8/kernels/scale_source.py is the same in Python.
#pragma once

#include <cstdint>

namespace jax_fp8 {

// The rule from an element of an array to a scale: attributes of every operation that quantizes. The kernel itself
// picks one of several scales, or computes the scale from an amax. That takes nanoseconds, while a kernel launched for
// it alone would cost microseconds.
struct ScaleRule {
  int32_t row;         // the index of the element in the array
  bool from_amax;      // whether the element is the amax of x, from which the rest makes a scale; else it is the scale
  int32_t margin;      // powers of two of headroom
  float amax_epsilon;  // smallest amax
  bool power_2_scale;  // whether the scale is rounded up to a power of two
};

struct ScaleSource {
  const float* array;  // [] or [scales], on the device
  ScaleRule rule;
};

}  // namespace jax_fp8
