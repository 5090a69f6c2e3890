#include "norm.h"

#include "by_tile_ffi.h"
#include "ffi.h"
#include "scale_source_ffi.h"

namespace jax_fp8 {

struct NormAttributes {
  float epsilon;
  ScaleRule rule;
};

struct NormTileAttributes {
  float epsilon;
  TileRule rule;
};

}  // namespace jax_fp8

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp8::NormAttributes, xla::ffi::StructMember<float>("epsilon"),
                                      JAX_FP8_SCALE_RULE_MEMBERS);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp8::NormTileAttributes, xla::ffi::StructMember<float>("epsilon"),
                                      JAX_FP8_TILE_RULE_MEMBERS);

namespace jax_fp8 {
namespace {

constexpr char kQuantize[] = "jax_fp8_norm_quantize";
constexpr char kQuantizeByTile[] = "jax_fp8_norm_quantize_by_tile";
constexpr char kAmax[] = "jax_fp8_norm_amax";
constexpr char kBackward[] = "jax_fp8_norm_backward";

using Shape = std::vector<int64_t>;

// A result that the caller does not need, or an optional operand that is missing, has the shape [0, 0]. The bias of
// RMSNorm has the shape [0].
bool is_absent(const ffi::AnyBuffer& buffer) { return shape_of(buffer) == Shape{0, 0}; }

template <typename T>
T* pointer_to(const ffi::AnyBuffer& buffer) {
  return is_absent(buffer) ? nullptr : static_cast<T*>(buffer.untyped_data());
}

Checks& check_present(Checks& checks, const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                      const Shape& shape) {
  return checks.dtype(name, buffer, {dtype}).shape(name, buffer, shape);
}

Checks& check_optional(Checks& checks, const char* name, const ffi::AnyBuffer& buffer, ffi::DataType dtype,
                       const Shape& shape) {
  checks.dtype(name, buffer, {dtype});
  return is_absent(buffer) ? checks : checks.shape(name, buffer, shape);
}

// ---- forward --------------------------------------------------------------------------------------------------------

bool is_layernorm(const ffi::AnyBuffer& norm_bias) { return !is_empty(norm_bias); }

Checks check_norm(const char* operation, const ffi::AnyBuffer& x, const ffi::AnyBuffer& norm_scale,
                  const ffi::AnyBuffer& norm_bias, float epsilon) {
  Checks checks(operation);
  checks.matrix("x", x).dtype("x", x, {ffi::F32, ffi::BF16, ffi::F16});
  if (!checks.passed()) return checks;
  const int64_t cols = x.dimensions()[1];
  checks.require(cols > 0, "x", x, "have at least one column").not_negative("epsilon", epsilon);
  check_present(checks, "norm_scale", norm_scale, ffi::F32, {cols});
  check_present(checks, "norm_bias", norm_bias, ffi::F32, {is_layernorm(norm_bias) ? cols : 0});
  return checks;
}

NormArguments norm_arguments(const ffi::AnyBuffer& x, const ffi::AnyBuffer& norm_scale, const ffi::AnyBuffer& norm_bias,
                             float epsilon) {
  return {
      .x = x.untyped_data(),
      .x_type = *source_type(x.element_type()),
      .norm_scale = norm_scale.typed_data<float>(),
      .norm_bias = is_layernorm(norm_bias) ? norm_bias.typed_data<float>() : nullptr,
      .epsilon = epsilon,
      .rows = x.dimensions()[0],
      .cols = x.dimensions()[1],
  };
}

ffi::Error norm_quantize(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer source, ffi::AnyBuffer norm_scale,
                         ffi::AnyBuffer norm_bias, ffi::Result<ffi::AnyBuffer> values,
                         ffi::Result<ffi::AnyBuffer> values_t, ffi::Result<ffi::AnyBuffer> amax,
                         ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::AnyBuffer> mean,
                         ffi::Result<ffi::AnyBuffer> rstd, NormAttributes attributes) {
  const auto& [epsilon, rule] = attributes;
  Checks checks = check_norm(kQuantize, x, norm_scale, norm_bias, epsilon);
  if (!checks.passed()) return checks.error();
  const int64_t rows = x.dimensions()[0], cols = x.dimensions()[1];
  check_source(checks, source, rule).dtype("the result values", *values, {ffi::F8E4M3FN, ffi::F8E5M2});
  check_optional(checks, "the result values", *values, values->element_type(), {rows, cols});
  check_optional(checks, "the result values_t", *values_t, values->element_type(), {cols, rows});
  checks.float32_scalar("the result amax", *amax).float32_scalar("the result scale", *scale);
  check_optional(checks, "the result mean", *mean, ffi::F32, {rows, 1});
  check_optional(checks, "the result rstd", *rstd, ffi::F32, {rows, 1});
  if (!checks.passed()) return checks.error();
  const NormQuantizeArguments arguments{
      .norm = norm_arguments(x, norm_scale, norm_bias, epsilon),
      .source = {.array = source.typed_data<float>(), .rule = rule},
      .format = *fp8_type(values->element_type()),
      .scale = scale->typed_data<float>(),
      .results = {.values = pointer_to<uint8_t>(*values),
                  .values_t = pointer_to<uint8_t>(*values_t),
                  .amax = amax->typed_data<float>(),
                  .mean = pointer_to<float>(*mean),
                  .rstd = pointer_to<float>(*rstd)},
  };
  return launch_result(kQuantize, launch_norm_quantize(arguments, stream));
}

ffi::Error norm_quantize_by_tile(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer norm_scale,
                                 ffi::AnyBuffer norm_bias, ffi::Result<ffi::AnyBuffer> values,
                                 ffi::Result<ffi::AnyBuffer> values_t, ffi::Result<ffi::AnyBuffer> amax,
                                 ffi::Result<ffi::AnyBuffer> scales, ffi::Result<ffi::AnyBuffer> scales_t,
                                 ffi::Result<ffi::AnyBuffer> mean, ffi::Result<ffi::AnyBuffer> rstd,
                                 NormTileAttributes attributes) {
  const auto& [epsilon, rule] = attributes;
  Checks checks = check_norm(kQuantizeByTile, x, norm_scale, norm_bias, epsilon);
  if (!checks.passed()) return checks.error();
  const int64_t rows = x.dimensions()[0], cols = x.dimensions()[1];
  const TileBuffers buffers{*values, *values_t, *amax, *scales, *scales_t};
  check_by_tile(checks, buffers, rows, cols, rule);
  // Not optional: where the cast is a kernel of its own, that kernel reads them.
  check_present(checks, "the result mean", *mean, ffi::F32, is_layernorm(norm_bias) ? Shape{rows, 1} : Shape{0, 0});
  check_present(checks, "the result rstd", *rstd, ffi::F32, {rows, 1});
  if (!checks.passed()) return checks.error();
  const NormQuantizeByTileArguments arguments{
      .norm = norm_arguments(x, norm_scale, norm_bias, epsilon),
      .cast = cast_of(buffers, rule),
      .mean = pointer_to<float>(*mean),
      .rstd = rstd->typed_data<float>(),
  };
  return launch_result(kQuantizeByTile, launch_norm_quantize_by_tile(arguments, stream));
}

ffi::Error norm_amax(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer norm_scale, ffi::AnyBuffer norm_bias,
                     ffi::Result<ffi::AnyBuffer> amax, float epsilon) {
  Checks checks = check_norm(kAmax, x, norm_scale, norm_bias, epsilon);
  checks.float32_scalar("the result", *amax);
  if (!checks.passed()) return checks.error();
  const NormArguments arguments = norm_arguments(x, norm_scale, norm_bias, epsilon);
  return launch_result(kAmax, launch_norm_amax(arguments, amax->typed_data<float>(), stream));
}

// ---- backward -------------------------------------------------------------------------------------------------------

ffi::Error norm_backward(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer x, ffi::AnyBuffer residual,
                         ffi::AnyBuffer norm_scale, ffi::AnyBuffer mean, ffi::AnyBuffer rstd,
                         ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> dscale,
                         ffi::Result<ffi::AnyBuffer> dbias, ffi::Result<ffi::AnyBuffer> dscale_partials,
                         ffi::Result<ffi::AnyBuffer> dbias_partials) {
  Checks checks(kBackward);
  checks.matrix("x", x).dtype("x", x, {ffi::F32, ffi::BF16, ffi::F16});
  checks.rank("the result dscale_partials", *dscale_partials, 2);
  if (!checks.passed()) return checks.error();
  const int64_t rows = x.dimensions()[0], cols = x.dimensions()[1], partials = dscale_partials->dimensions()[0];
  const bool layernorm = !is_absent(mean);
  checks.require(cols > 0, "x", x, "have at least one column")
      .require(partials > 0, "the result dscale_partials", *dscale_partials, "have at least one row");
  check_present(checks, "dy", dy, x.element_type(), {rows, cols});
  check_optional(checks, "residual", residual, x.element_type(), {rows, cols});
  check_present(checks, "norm_scale", norm_scale, ffi::F32, {cols});
  check_optional(checks, "mean", mean, ffi::F32, {rows, 1});
  check_present(checks, "rstd", rstd, ffi::F32, {rows, 1});
  check_present(checks, "the result dx", *dx, x.element_type(), {rows, cols});
  check_present(checks, "the result dscale", *dscale, ffi::F32, {cols});
  check_present(checks, "the result dbias", *dbias, ffi::F32, {layernorm ? cols : 0});
  check_present(checks, "the result dscale_partials", *dscale_partials, ffi::F32, {partials, cols});
  check_present(checks, "the result dbias_partials", *dbias_partials, ffi::F32,
                layernorm ? Shape{partials, cols} : Shape{0, 0});
  if (!checks.passed()) return checks.error();
  const NormBackwardArguments arguments{
      .dy = dy.untyped_data(),
      .x = x.untyped_data(),
      .residual = pointer_to<void>(residual),
      .type = *source_type(x.element_type()),
      .norm_scale = norm_scale.typed_data<float>(),
      .mean = pointer_to<float>(mean),
      .rstd = rstd.typed_data<float>(),
      .dx = dx->untyped_data(),
      .dscale = dscale->typed_data<float>(),
      .dbias = layernorm ? dbias->typed_data<float>() : nullptr,
      .dscale_partials = dscale_partials->typed_data<float>(),
      .dbias_partials = pointer_to<float>(*dbias_partials),
      .partials = partials,
      .rows = rows,
      .cols = cols,
  };
  return launch_result(kBackward, launch_norm_backward(arguments, stream));
}

XLA_FFI_DEFINE_HANDLER(quantize_handler, norm_quantize, BoundByParameters(), {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(by_tile_handler, norm_quantize_by_tile, BoundByParameters(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(amax_handler, norm_amax,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // norm_scale
                           .Arg<ffi::AnyBuffer>()  // norm_bias
                           .Ret<ffi::AnyBuffer>()  // amax
                           .Attr<float>("epsilon"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(backward_handler, norm_backward, BoundByParameters(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const norm_quantize_handler = quantize_handler;
XLA_FFI_Handler* const norm_quantize_by_tile_handler = by_tile_handler;
XLA_FFI_Handler* const norm_amax_handler = amax_handler;
XLA_FFI_Handler* const norm_backward_handler = backward_handler;

}  // namespace jax_fp8
