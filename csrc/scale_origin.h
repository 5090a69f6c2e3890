// Where a kernel that quantizes finds its scale: attributes of each such operation.
#pragma once

#include <cstdint>

namespace jax_fp8 {

// What a scale is made of: an element of its source, and what is done to it. Reading one of several scales, or turning an amax
// into a scale, is work of nanoseconds, for which a kernel of its own would cost microseconds.
struct ScaleOrigin {
  int32_t row;         // the element of the source
  bool from_amax;      // whether it is the amax of x, to be scaled by the rest, or already the scale
  int32_t margin;      // powers of two of headroom
  float amax_epsilon;  // smallest amax
  bool power_2_scale;  // rounded up to a power of two
};

}  // namespace jax_fp8
