// Where a kernel that quantizes finds its scale; as jax_fp8/kernels/scale_source.py has it.
#pragma once

#include <cstdint>

namespace jax_fp8 {

// What a scale is made of: an element of an array, and what is done to it. Attributes of each operation that quantizes.
// Reading one of several scales, or turning an amax into a scale, is work of nanoseconds, for which a kernel of its own
// would cost microseconds.
struct ScaleRule {
  int32_t row;         // the element of the array
  bool from_amax;      // whether it is the amax of x, to be scaled by the rest, or already the scale
  int32_t margin;      // powers of two of headroom
  float amax_epsilon;  // smallest amax
  bool power_2_scale;  // rounded up to a power of two
};

struct ScaleSource {
  const float* array;  // [] or [scales], on the device
  ScaleRule rule;
};

}  // namespace jax_fp8
