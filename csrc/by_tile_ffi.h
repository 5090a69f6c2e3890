// The attributes and the results of a cast by tiles as XLA passes them, their checks, and the `TileCast` made of them.
#pragma once

#include "by_tile.h"
#include "ffi.h"

// As in scale_source_ffi.h: an operation with further attributes has a struct of them all, with the rule last.
#define JAX_FP8_TILE_RULE_MEMBERS                                                                           \
  xla::ffi::StructMember<bool>("square"), xla::ffi::StructMember<bool>("square_t"),                         \
      xla::ffi::StructMember<int32_t>("margin"), xla::ffi::StructMember<float>("amax_epsilon"),             \
      xla::ffi::StructMember<bool>("power_2_scale")

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp8::TileRule, JAX_FP8_TILE_RULE_MEMBERS);

namespace jax_fp8 {

struct TileBuffers {
  ffi::AnyBuffer values, values_t, amax, scales, scales_t;
};

inline int64_t tiles_of(int64_t length) { return divide_up(length, kTile); }

// `values` must be a matrix [rows, cols] whose rows lie along the contracted dim, and `scales` must have one element
// for each tile. Both have shape [0, 0] if the caller does not need them.
inline Checks& check_tiled(Checks& checks, const char* name, const ffi::AnyBuffer& values, const char* scales_name,
                           const ffi::AnyBuffer& scales, int64_t rows, int64_t cols, bool square) {
  using Shape = std::vector<int64_t>;
  const bool wanted = shape_of(values) != Shape{0, 0};
  const Shape tiles = square ? Shape{tiles_of(rows), tiles_of(cols)} : Shape{tiles_of(cols), rows};
  checks.dtype(name, values, {ffi::F8E4M3FN}).dtype(scales_name, scales, {ffi::F32});
  if (wanted) checks.shape(name, values, {rows, cols});
  return checks.shape(scales_name, scales, wanted ? tiles : Shape{0, 0});
}

// `rows` and `cols` are those of the matrix that is cast.
inline Checks& check_by_tile(Checks& checks, const TileBuffers& buffers, int64_t rows, int64_t cols,
                             const TileRule& rule) {
  checks.margin(rule.margin).not_negative("amax_epsilon", rule.amax_epsilon);
  check_tiled(checks, "the result values", buffers.values, "the result scales", buffers.scales, rows, cols,
              rule.square);
  check_tiled(checks, "the result values_t", buffers.values_t, "the result scales_t", buffers.scales_t, cols, rows,
              rule.square_t);
  return checks.float32_scalar("the result amax", buffers.amax);
}

// A result without elements is one that the caller does not need.
template <typename T>
T* pointer_or_null(const ffi::AnyBuffer& buffer) {
  return is_empty(buffer) ? nullptr : static_cast<T*>(buffer.untyped_data());
}

inline TileCast cast_of(const TileBuffers& buffers, const TileRule& rule) {
  return {
      .rule = rule,
      .values = pointer_or_null<uint8_t>(buffers.values),
      .values_t = pointer_or_null<uint8_t>(buffers.values_t),
      .amax = buffers.amax.typed_data<float>(),
      .scales = pointer_or_null<float>(buffers.scales),
      .scales_t = pointer_or_null<float>(buffers.scales_t),
  };
}

}  // namespace jax_fp8
