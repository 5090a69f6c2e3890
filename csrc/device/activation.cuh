// Activations and their gradients, computed in float32. T is the dtype to which the caller rounds the result. If T has
// 16 bits, they use the hardware's approximate exponential and reciprocal: their relative error, some 2**-22, almost
// always vanishes in that rounding.
#pragma once

#include <cstdint>

#include "../activation.h"
#include "exponential.cuh"

namespace jax_fp8 {

__device__ inline float reciprocal_approximate(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// s = sigmoid(z) = 1 / (1 + exp(-z)). The argument is log2(e) z, since callers fold log2(e) into another factor.
template <typename T>
struct Sigmoid {
  float exponential;
  float value;

  __device__ explicit Sigmoid(float scaled) : exponential(power_of_2<T>(-scaled)) {
    if constexpr (sizeof(T) == sizeof(float)) {
      value = __frcp_rn(1.0f + exponential);
    } else {
      value = reciprocal_approximate(1.0f + exponential);
    }
  }

  // s (1 - s), computed as s² exp(-z): where s is near 1, the difference 1 - s would be mostly the rounding error of s.
  // The bound handles exp(-z) = infinity with s = 0, whose product would be NaN.
  __device__ float slope() const { return (value * value) * fminf(exponential, 0x1p126f); }
};

// Each activation has value(x) and gradient(dy, x) = dy f'(x). f' multiplies x by s (1 - s) or by the density of the
// normal distribution. Both vanish before x or its square overflows, so f' is finite for every finite x.

// x s, s = sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x³).
template <typename T>
struct Gelu {
  static constexpr float kLinear = 1.5957691216f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.0713548163f;   // 2 sqrt(2 / pi) 0.044715

  __device__ static Sigmoid<T> sigmoid(float x) {
    return Sigmoid<T>(x * (kLog2E * kLinear + kLog2E * kCubic * (x * x)));
  }

  __device__ static float value(float x) { return x * sigmoid(x).value; }

  // f' = s + x s (1 - s) (2u)', (2u)' = kLinear + 3 kCubic x².
  // Beyond |x| = 20, s is 0 or 1, and the bound keeps (2u)' finite.
  __device__ static float gradient(float dy, float x) {
    const Sigmoid<T> s = sigmoid(x);
    const float slope = s.slope() * (kLinear + 3.0f * kCubic * fminf(x * x, 400.0f));
    return dy * (s.value + x * slope);
  }
};

// Phi(x) = erfc(-x / sqrt(2)) / 2, the distribution function of the normal distribution,
// and its density exp(-x²/2) / sqrt(2 pi).
template <typename T>
struct Normal {
  float distribution;
  float density;

  __device__ explicit Normal(float x) {
    const float exponential = power_of_2<T>(-0.5f * kLog2E * (x * x));
    density = 0.3989422804f * exponential;
    if constexpr (sizeof(T) == sizeof(float)) {
      distribution = 0.5f * erfcf(-0.7071067812f * x);
    } else {  // erfcf costs 50 instructions; this costs 18, with the exponential that a gradient needs anyway
      const float tail = exponential * scaled_tail(fabsf(x));
      distribution = x > 0.0f ? 1.0f - tail : tail;  // unlike 1 + erf, the tail keeps its relative precision
    }
  }

  // Phi(-x) exp(x²/2) for x >= 0, as a polynomial in k = 1 / (1 + 0.4 x). The coefficients come from least squares,
  // reweighted until the largest error was smallest: 4e-8 for Phi, and 7e-7 relative far in the tail.
  __device__ static float scaled_tail(float x) {
    const float k = reciprocal_approximate(1.0f + 0.4f * x);
    float sum = -0.0350222997f;
    sum = sum * k + 0.179515719f;
    sum = sum * k - 0.332965612f;
    sum = sum * k + 0.208161503f;
    sum = sum * k + 0.0142465103f;
    sum = sum * k + 0.148447156f;
    sum = sum * k + 0.157966316f;
    sum = sum * k + 0.159650743f;
    return sum * k;
  }
};

// x Phi(x).
template <typename T>
struct GeluExact {
  __device__ static float value(float x) { return x * Normal<T>(x).distribution; }

  // f' = Phi + x phi.
  __device__ static float gradient(float dy, float x) {
    const Normal<T> normal(x);
    return dy * (normal.distribution + x * normal.density);
  }
};

// x s, s = sigmoid(x).
template <typename T>
struct Silu {
  __device__ static float value(float x) { return x * Sigmoid<T>(kLog2E * x).value; }

  // f' = s + x s (1 - s).
  __device__ static float gradient(float dy, float x) {
    const Sigmoid<T> s(kLog2E * x);
    return dy * (s.value + x * s.slope());
  }
};

// max(x, 0), which passes a NaN on. The gradient of an x that is not positive is 0, even if dy is infinite or NaN.
template <typename T>
struct Relu {
  __device__ static float value(float x) { return x <= 0.0f ? 0.0f : x; }
  __device__ static float gradient(float dy, float x) { return x > 0.0f ? dy : 0.0f; }
};

template <typename T>
struct SquaredRelu {
  __device__ static float value(float x) { return x <= 0.0f ? 0.0f : x * x; }
  __device__ static float gradient(float dy, float x) { return x > 0.0f ? dy * (2.0f * x) : 0.0f; }
};

// Calls with(Function{}). All threads take the same branch. Only gelu, silu and relu exist as gates.
template <typename T, bool kGated, typename With>
__device__ inline void with_activation(Activation activation, With with) {
  switch (activation) {
    case Activation::kGelu: return with(Gelu<T>{});
    case Activation::kSilu: return with(Silu<T>{});
    case Activation::kRelu: return with(Relu<T>{});
    case Activation::kGeluExact:
      if constexpr (!kGated) with(GeluExact<T>{});
      return;
    case Activation::kSquaredRelu:
      if constexpr (!kGated) with(SquaredRelu<T>{});
      return;
  }
}

}  // namespace jax_fp8
