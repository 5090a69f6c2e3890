// Exponentials. T is the dtype to which the caller rounds the result. If T has 16 bits, they use the hardware's
// approximation: its relative error, some 2**-22, almost always vanishes in that rounding.
#pragma once

namespace jax_fp8 {

constexpr float kLog2E = 1.4426950409f;  // exp(x) = 2**(log2(e) x)

__device__ inline float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

template <typename T>
__device__ inline float power_of_2(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return exp2f(x);
  } else {
    return exp2_approximate(x);
  }
}

}  // namespace jax_fp8
