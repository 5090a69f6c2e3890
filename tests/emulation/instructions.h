// The PTX instructions of csrc as functions: `asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x))` is rewritten to
// `ptx::cvt_f32_f16(y, x)`.
//
// Conversions are exact. The hardware's approximations have an error here as large as PTX allows, up or down, so that
// code which relies on more accuracy than PTX promises returns wrong results.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace emulation {

struct Format {
  int mantissa_bits, bias, sign_bit;
  uint32_t overflow;  // the result for numbers beyond the largest
  uint32_t nan;       // the result for every NaN
  uint32_t infinity;  // bits above it are NaNs
};

constexpr Format kE4M3 = {3, 7, 7, 0x7E, 0x7F, 0x7F};  // no infinity
constexpr Format kE5M2 = {2, 15, 7, 0x7B, 0x7F, 0x7C};
constexpr Format kFloat16 = {10, 15, 15, 0x7C00, 0x7FFF, 0x7C00};
constexpr Format kBFloat16 = {7, 127, 15, 0x7F80, 0x7FFF, 0x7F80};

// Rounded to nearest even.
inline uint32_t encode(Format format, float x) {
  if (x != x) return format.nan;
  const uint32_t sign = std::signbit(x) ? 1u << format.sign_bit : 0;
  if (std::isinf(x)) return sign | format.overflow;
  const double magnitude = std::fabs(x);
  const int smallest = 1 - format.bias;
  const int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), smallest) : smallest;
  const double steps = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  // Rounded up to the next power of two, the steps carry into the exponent.
  const double bits = std::ldexp(exponent - smallest, format.mantissa_bits) + steps;
  return sign | (bits > format.overflow ? format.overflow : static_cast<uint32_t>(bits));
}

inline float decode(Format format, uint32_t bits) {
  const uint32_t magnitude = bits & ((1u << format.sign_bit) - 1);
  const uint32_t exponent = magnitude >> format.mantissa_bits,
                 mantissa = magnitude - (exponent << format.mantissa_bits);
  const bool is_nan = format.infinity == format.nan ? magnitude == format.nan : magnitude > format.infinity;
  if (is_nan) return std::bit_cast<float>(0x7FFFFFFFu);
  const uint32_t hidden = exponent == 0 ? 0 : 1u << format.mantissa_bits;
  const int scale = static_cast<int>(exponent == 0 ? 1 : exponent) - format.bias - format.mantissa_bits;
  const bool infinite = magnitude == format.infinity && format.infinity != format.nan;
  const float value = infinite ? HUGE_VALF : std::ldexp(static_cast<float>(hidden + mantissa), scale);
  return bits >> format.sign_bit & 1 ? -value : value;
}

inline uint32_t encode_pair(Format format, float high, float low) {
  return encode(format, high) << (format.sign_bit + 1) | encode(format, low);
}

inline uint32_t halves_from_fp8(Format format, uint16_t bytes) {
  return encode_pair(kFloat16, decode(format, bytes >> 8), decode(format, bytes & 0xFF));
}

// The larger magnitude of two numbers, given as bits, with the sign of their product. A NaN loses, or wins if
// `nan_wins`.
inline uint32_t larger_magnitude(uint32_t a, uint32_t b, uint32_t sign_bit, uint32_t infinity, bool nan_wins) {
  const uint32_t x = a & (sign_bit - 1), y = b & (sign_bit - 1);
  if ((nan_wins ? x > infinity || y > infinity : x > infinity && y > infinity)) return sign_bit - 1;
  const uint32_t larger = x > infinity ? y : y > infinity ? x : std::max(x, y);
  return larger | ((a ^ b) & sign_bit);
}

inline uint32_t larger_magnitudes(uint32_t a, uint32_t b, uint32_t infinity, bool nan_wins) {
  return larger_magnitude(a >> 16, b >> 16, 0x8000, infinity, nan_wins) << 16 |
         larger_magnitude(a & 0xFFFF, b & 0xFFFF, 0x8000, infinity, nan_wins);
}

inline float larger_magnitude(float a, float b, bool nan_wins) {
  const auto bits = [](float x) { return std::bit_cast<uint32_t>(x); };
  return std::bit_cast<float>(larger_magnitude(bits(a), bits(b), 0x80000000u, 0x7F800000u, nan_wins));
}

inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// Moves a result up or down, depending on the operand's bits, by half of the error; rounding to float32 is the other
// half.
inline float approximate(double exact, double relative_error, float operand) {
  const int direction = static_cast<int>(std::bit_cast<uint32_t>(operand) * 0x9E3779B1u >> 16) % 3 - 1;
  return static_cast<float>(exact * (1 + direction * relative_error / 2));
}

}  // namespace emulation

namespace ptx {

using namespace emulation;

inline void mov_b32(uint16_t& low, uint16_t& high, uint32_t x) { low = x & 0xFFFF, high = x >> 16; }

inline void cvt_rn_satfinite_e4m3x2_f32(uint16_t& d, float high, float low) { d = encode_pair(kE4M3, high, low); }
inline void cvt_rn_satfinite_e5m2x2_f32(uint16_t& d, float high, float low) { d = encode_pair(kE5M2, high, low); }
inline void cvt_rn_f16x2_e4m3x2(uint32_t& d, uint16_t bytes) { d = halves_from_fp8(kE4M3, bytes); }
inline void cvt_rn_f16x2_e5m2x2(uint32_t& d, uint16_t bytes) { d = halves_from_fp8(kE5M2, bytes); }
inline void cvt_rn_f16x2_f32(uint32_t& d, float high, float low) { d = encode_pair(kFloat16, high, low); }
inline void cvt_rn_bf16x2_f32(uint32_t& d, float high, float low) { d = encode_pair(kBFloat16, high, low); }
inline void cvt_rn_f16_f32(uint16_t& d, float x) { d = encode(kFloat16, x); }
inline void cvt_rn_bf16_f32(uint16_t& d, float x) { d = encode(kBFloat16, x); }
inline void cvt_f32_f16(float& d, uint16_t x) { d = decode(kFloat16, x); }
inline void cvt_f32_bf16(float& d, uint16_t x) { d = decode(kBFloat16, x); }

inline void max_NaN_f32(float& d, float x, float y) {
  d = x != x || y != y ? std::bit_cast<float>(0x7FFFFFFFu) : std::fmax(x, y);
}

inline void max_xorsign_abs_f32(float& d, float x, float y) { d = larger_magnitude(x, y, false); }
inline void max_NaN_xorsign_abs_f32(float& d, float x, float y) { d = larger_magnitude(x, y, true); }
inline void max_xorsign_abs_bf16x2(uint32_t& d, uint32_t x, uint32_t y) { d = larger_magnitudes(x, y, 0x7F80, false); }
inline void max_NaN_xorsign_abs_bf16x2(uint32_t& d, uint32_t x, uint32_t y) {
  d = larger_magnitudes(x, y, 0x7F80, true);
}
inline void max_xorsign_abs_f16x2(uint32_t& d, uint32_t x, uint32_t y) { d = larger_magnitudes(x, y, 0x7C00, false); }
inline void max_NaN_xorsign_abs_f16x2(uint32_t& d, uint32_t x, uint32_t y) {
  d = larger_magnitudes(x, y, 0x7C00, true);
}

inline void ld_global_nc_f32(float& d, const float* source) { d = *source; }
inline void rcp_approx_ftz_f32(float& d, float x) { d = flush(approximate(1.0 / flush(x), 0x1p-23, x)); }
inline void rsqrt_approx_ftz_f32(float& d, float x) { d = approximate(1.0 / std::sqrt(double{flush(x)}), 0x1p-22, x); }
inline void sqrt_approx_ftz_f32(float& d, float x) { d = approximate(std::sqrt(double{flush(x)}), 0x1p-22, x); }
inline void ex2_approx_ftz_f32(float& d, float x) { d = flush(approximate(std::exp2(double{flush(x)}), 0x1p-22, x)); }
inline void lg2_approx_ftz_f32(float& d, float x) { d = approximate(std::log2(double{flush(x)}), 0x1p-22, x); }
inline void tanh_approx_f32(float& d, float x) {
  d = std::fmin(std::fmax(approximate(std::tanh(double{x}), 0x1p-11, x), -1.0f), 1.0f);
}

}  // namespace ptx
