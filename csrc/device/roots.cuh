// Square roots, and quotients by them, of a few neighbours at once.
#pragma once

namespace jax_fp8 {

// The compiler's IEEE square root and division each have a branch for every element, to code for rare operands, and the
// elements cannot overlap across these branches. Here a thread tests all its neighbours with one branch. If all
// operands are common, they take the compiler's own fast path, from the hardware's approximation to the correctly
// rounded result. If one of them is not, all take the compiler's functions. Common are zero, which a param without
// gradients has, and a range in which neither the result nor the remainder that corrects it leaves the normal numbers.
__device__ inline bool is_common_square(float x) { return (x == 0.0f) | ((x >= 0x1p-100f) & (x <= 0x1p38f)); }

__device__ inline bool is_common_dividend(float x) {
  return (x == 0.0f) | ((fabsf(x) >= 0x1p-100f) & (fabsf(x) <= 0x1p60f));
}

__device__ inline bool is_common_divisor(float x) { return (x >= 0x1p-60f) & (x <= 0x1p19f); }

__device__ inline float common_root(float x) {
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  const float root = __fmul_rn(x, inverse);
  return x == 0.0f ? x : __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(inverse, 0.5f), root);
}

__device__ inline float common_quotient(float x, float y) {
  float approximation;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(approximation) : "f"(y));
  const float inverse = __fmaf_rn(approximation, __fmaf_rn(-y, approximation, 1.0f), approximation);
  const float quotient = __fmul_rn(x, inverse);
  return x == 0.0f ? x : __fmaf_rn(inverse, __fmaf_rn(-y, quotient, x), quotient);
}

__device__ inline bool likely(bool condition) { return __builtin_expect(condition, true); }

// x = sqrt(x)
template <int kCount>
__device__ inline void take_roots(float (&x)[kCount]) {
  bool common = true;
#pragma unroll
  for (int i = 0; i < kCount; ++i) common = common & is_common_square(x[i]);
  if (likely(common)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = common_root(x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = __fsqrt_rn(x[i]);
  }
}

// x = x / (sqrt(squares) + eps). For a common square and a common eps, the divisor is common too.
template <int kCount>
__device__ inline void divide_by_roots(float (&x)[kCount], const float (&squares)[kCount], float eps) {
  bool common = is_common_divisor(eps);
#pragma unroll
  for (int i = 0; i < kCount; ++i) common = common & is_common_square(squares[i]) & is_common_dividend(x[i]);
  if (likely(common)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = common_quotient(x[i], __fadd_rn(common_root(squares[i]), eps));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = __fdiv_rn(x[i], __fadd_rn(__fsqrt_rn(squares[i]), eps));
  }
}

}  // namespace jax_fp8
