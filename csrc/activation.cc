#include "activation.h"

#include <string_view>

#include "by_tile_ffi.h"
#include "column_sums_ffi.h"
#include "ffi.h"
#include "scale_source_ffi.h"

namespace jax_fp8 {

struct ActivationAttributes {
  std::string_view activation;
  ScaleRule rule;
};

struct ActivationTileAttributes {
  std::string_view activation;
  TileRule rule;
};

}  // namespace jax_fp8

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp8::ActivationAttributes,
                                      xla::ffi::StructMember<std::string_view>("activation"),
                                      JAX_FP8_SCALE_RULE_MEMBERS);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp8::ActivationTileAttributes,
                                      xla::ffi::StructMember<std::string_view>("activation"),
                                      JAX_FP8_TILE_RULE_MEMBERS);

namespace jax_fp8 {
namespace {

constexpr char kQuantize[] = "jax_fp8_activation_quantize";
constexpr char kQuantizeByTile[] = "jax_fp8_activation_quantize_by_tile";
constexpr char kBackwardQuantizeByTile[] = "jax_fp8_activation_backward_quantize_by_tile";
constexpr char kAmax[] = "jax_fp8_activation_amax";
constexpr char kBackwardQuantize[] = "jax_fp8_activation_backward_quantize";
constexpr char kBackwardAmax[] = "jax_fp8_activation_backward_amax";

// Checked inputs: `value` is set only where `checks` passed. Without `dy` the call is the forward activation.
struct Inputs {
  Checks checks;
  ActivationInputs value;
};

Inputs inputs_of(const char* operation, std::string_view name, const ffi::AnyBuffer& x, const ffi::AnyBuffer* dy,
                 const ffi::RemainingArgs& row_weights) {
  Inputs inputs{Checks(operation), {}};
  const NamedActivation* found = find_activation(name);
  inputs.checks.require(found, "x", x, "come with one of the known activations, not \"" + std::string(name) + "\"")
      .matrix("x", x)
      .dtype("x", x, {ffi::F32, ffi::BF16, ffi::F16});
  if (!inputs.checks.passed()) return inputs;
  const int64_t rows = x.dimensions()[0], cols = x.dimensions()[1], parts = found->gated ? 2 : 1;
  inputs.checks.require(cols % parts == 0, "x", x, "have an even number of columns, gate and linear");
  if (dy) inputs.checks.dtype("dy", *dy, {x.element_type()}).shape("dy", *dy, {rows, cols / parts});
  inputs.checks.require(row_weights.size() <= 1, "x", x, "come with one operand of row weights, or none");
  const auto weights = row_weights.get<ffi::AnyBuffer>(0);
  if (weights.has_value()) {
    inputs.checks.dtype("row_weights", *weights, {ffi::F32}).shape("row_weights", *weights, {rows});
  }
  if (!inputs.checks.passed()) return inputs;
  inputs.value = {
      .dy = dy ? dy->untyped_data() : nullptr,
      .x = x.untyped_data(),
      .row_weights = weights.has_value() ? weights->typed_data<float>() : nullptr,
      .type = *source_type(x.element_type()),
      .activation = found->activation,
      .gated = found->gated,
      .rows = rows,
      .width = cols / parts,
  };
  return inputs;
}

struct Results {
  ffi::AnyBuffer source, values, values_t, amax, scale;
};

// `cols` are the columns of the quantized matrix. The caller leaves out values or values_t by the shape [0, 0].
Checks& check(Checks& checks, const Results& results, int64_t rows, int64_t cols, const ScaleRule& rule) {
  const auto wanted = [](const ffi::AnyBuffer& buffer) { return shape_of(buffer) != std::vector<int64_t>{0, 0}; };
  check_source(checks, results.source, rule).dtype("the result values", results.values, {ffi::F8E4M3FN, ffi::F8E5M2});
  if (wanted(results.values)) checks.shape("the result values", results.values, {rows, cols});
  checks.dtype("the result values_t", results.values_t, {results.values.element_type()});
  if (wanted(results.values_t)) checks.shape("the result values_t", results.values_t, {cols, rows});
  return checks.float32_scalar("the result amax", results.amax).float32_scalar("the result scale", results.scale);
}

ActivationArguments arguments_of(const ActivationInputs& inputs, const Results& results, const ScaleRule& rule) {
  const auto bytes_of = [](const ffi::AnyBuffer& buffer) {
    return is_empty(buffer) ? nullptr : static_cast<uint8_t*>(buffer.untyped_data());
  };
  return {
      .inputs = inputs,
      .source = {.array = results.source.typed_data<float>(), .rule = rule},
      .format = *fp8_type(results.values.element_type()),
      .values = bytes_of(results.values),
      .values_t = bytes_of(results.values_t),
      .amax = results.amax.typed_data<float>(),
      .scale = results.scale.typed_data<float>(),
  };
}

ffi::Error quantize(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer source, ffi::RemainingArgs row_weights,
                    ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> values_t,
                    ffi::Result<ffi::AnyBuffer> amax, ffi::Result<ffi::AnyBuffer> scale,
                    ActivationAttributes attributes) {
  const auto& [activation, rule] = attributes;
  Inputs inputs = inputs_of(kQuantize, activation, x, nullptr, row_weights);
  const Results results{source, *values, *values_t, *amax, *scale};
  if (inputs.checks.passed()) check(inputs.checks, results, inputs.value.rows, inputs.value.width, rule);
  if (!inputs.checks.passed()) return inputs.checks.error();
  return launch_result(kQuantize, launch_activation_quantize(arguments_of(inputs.value, results, rule), stream));
}

ffi::Error backward_quantize(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer x, ffi::AnyBuffer source,
                             ffi::AnyBuffer activated_scale, ffi::RemainingArgs row_weights,
                             ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> values_t,
                             ffi::Result<ffi::AnyBuffer> activated_t, ffi::Result<ffi::AnyBuffer> amax,
                             ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::AnyBuffer> sums,
                             ffi::Result<ffi::AnyBuffer> partial_sums, ActivationAttributes attributes) {
  const auto& [activation, rule] = attributes;
  Inputs inputs = inputs_of(kBackwardQuantize, activation, x, &dy, row_weights);
  const Results results{source, *values, *values_t, *amax, *scale};
  if (inputs.checks.passed()) {
    const int64_t rows = x.dimensions()[0], cols = x.dimensions()[1];
    check_sums(check(inputs.checks, results, rows, cols, rule), *sums, *partial_sums, rows, cols)
        .float32_scalar("activated_scale", activated_scale)
        .dtype("the result activated_t", *activated_t, {ffi::F8E4M3FN, ffi::F8E5M2})
        .shape("the result activated_t", *activated_t, {inputs.value.width, rows});
  }
  if (!inputs.checks.passed()) return inputs.checks.error();
  ActivationArguments arguments = arguments_of(inputs.value, results, rule);
  arguments.sums = {.result = sums->typed_data<float>(), .partial = partial_sums->typed_data<float>()};
  arguments.activated_scale = activated_scale.typed_data<float>();
  arguments.activated_format = *fp8_type(activated_t->element_type());
  arguments.activated_t = static_cast<uint8_t*>(activated_t->untyped_data());
  return launch_result(kBackwardQuantize, launch_activation_backward_quantize(arguments, stream));
}

ffi::Error quantize_by_tile(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs row_weights,
                            ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> values_t,
                            ffi::Result<ffi::AnyBuffer> amax, ffi::Result<ffi::AnyBuffer> scales,
                            ffi::Result<ffi::AnyBuffer> scales_t, ActivationTileAttributes attributes) {
  const auto& [activation, rule] = attributes;
  Inputs inputs = inputs_of(kQuantizeByTile, activation, x, nullptr, row_weights);
  const TileBuffers buffers{*values, *values_t, *amax, *scales, *scales_t};
  if (inputs.checks.passed()) check_by_tile(inputs.checks, buffers, inputs.value.rows, inputs.value.width, rule);
  if (!inputs.checks.passed()) return inputs.checks.error();
  const ActivationByTileArguments arguments{
      .inputs = inputs.value,
      .cast = cast_of(buffers, rule),
      .sums = {},
      .activated_t = nullptr,
      .activated_scales_t = nullptr,
  };
  return launch_result(kQuantizeByTile, launch_activation_quantize_by_tile(arguments, stream));
}

ffi::Error backward_quantize_by_tile(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer x,
                                     ffi::RemainingArgs row_weights, ffi::Result<ffi::AnyBuffer> values,
                                     ffi::Result<ffi::AnyBuffer> values_t, ffi::Result<ffi::AnyBuffer> amax,
                                     ffi::Result<ffi::AnyBuffer> scales, ffi::Result<ffi::AnyBuffer> scales_t,
                                     ffi::Result<ffi::AnyBuffer> activated_t,
                                     ffi::Result<ffi::AnyBuffer> activated_scales_t, ffi::Result<ffi::AnyBuffer> sums,
                                     ffi::Result<ffi::AnyBuffer> partial_sums, ActivationTileAttributes attributes) {
  const auto& [activation, rule] = attributes;
  Inputs inputs = inputs_of(kBackwardQuantizeByTile, activation, x, &dy, row_weights);
  const TileBuffers buffers{*values, *values_t, *amax, *scales, *scales_t};
  if (inputs.checks.passed()) {
    const int64_t rows = x.dimensions()[0], cols = x.dimensions()[1], width = inputs.value.width;
    check_sums(check_by_tile(inputs.checks, buffers, rows, cols, rule), *sums, *partial_sums, rows, cols)
        .dtype("the result activated_t", *activated_t, {ffi::F8E4M3FN})
        .shape("the result activated_t", *activated_t, {width, rows})
        .dtype("the result activated_scales_t", *activated_scales_t, {ffi::F32})
        .shape("the result activated_scales_t", *activated_scales_t, {tiles_of(rows), width});
  }
  if (!inputs.checks.passed()) return inputs.checks.error();
  const ActivationByTileArguments arguments{
      .inputs = inputs.value,
      .cast = cast_of(buffers, rule),
      .sums = {.result = sums->typed_data<float>(), .partial = partial_sums->typed_data<float>()},
      .activated_t = static_cast<uint8_t*>(activated_t->untyped_data()),
      .activated_scales_t = activated_scales_t->typed_data<float>(),
  };
  return launch_result(kBackwardQuantizeByTile, launch_activation_backward_quantize_by_tile(arguments, stream));
}

ffi::Error amax(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs row_weights,
                ffi::Result<ffi::AnyBuffer> result, std::string_view activation) {
  Inputs inputs = inputs_of(kAmax, activation, x, nullptr, row_weights);
  inputs.checks.float32_scalar("the result", *result);
  if (!inputs.checks.passed()) return inputs.checks.error();
  return launch_result(kAmax, launch_activation_amax(inputs.value, result->typed_data<float>(), stream));
}

ffi::Error backward_amax(cudaStream_t stream, ffi::AnyBuffer dy, ffi::AnyBuffer x, ffi::RemainingArgs row_weights,
                         ffi::Result<ffi::AnyBuffer> result, std::string_view activation) {
  Inputs inputs = inputs_of(kBackwardAmax, activation, x, &dy, row_weights);
  inputs.checks.float32_scalar("the result", *result);
  if (!inputs.checks.passed()) return inputs.checks.error();
  return launch_result(kBackwardAmax,
                       launch_activation_backward_amax(inputs.value, result->typed_data<float>(), stream));
}

auto bind_stream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

XLA_FFI_DEFINE_HANDLER(quantizing, quantize,
                       bind_stream()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // source
                           .RemainingArgs()        // row_weights
                           .Ret<ffi::AnyBuffer>()  // values
                           .Ret<ffi::AnyBuffer>()  // values_t
                           .Ret<ffi::AnyBuffer>()  // amax
                           .Ret<ffi::AnyBuffer>()  // scale
                           .Attrs<ActivationAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(backward_quantizing, backward_quantize,
                       bind_stream()
                           .Arg<ffi::AnyBuffer>()  // dy
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // source
                           .Arg<ffi::AnyBuffer>()  // activated_scale
                           .RemainingArgs()        // row_weights
                           .Ret<ffi::AnyBuffer>()  // values
                           .Ret<ffi::AnyBuffer>()  // values_t
                           .Ret<ffi::AnyBuffer>()  // activated_t
                           .Ret<ffi::AnyBuffer>()  // amax
                           .Ret<ffi::AnyBuffer>()  // scale
                           .Ret<ffi::AnyBuffer>()  // sums
                           .Ret<ffi::AnyBuffer>()  // partial_sums
                           .Attrs<ActivationAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(tiling, quantize_by_tile,
                       bind_stream()
                           .Arg<ffi::AnyBuffer>()  // x
                           .RemainingArgs()        // row_weights
                           .Ret<ffi::AnyBuffer>()  // values
                           .Ret<ffi::AnyBuffer>()  // values_t
                           .Ret<ffi::AnyBuffer>()  // amax
                           .Ret<ffi::AnyBuffer>()  // scales
                           .Ret<ffi::AnyBuffer>()  // scales_t
                           .Attrs<ActivationTileAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(backward_tiling, backward_quantize_by_tile,
                       bind_stream()
                           .Arg<ffi::AnyBuffer>()  // dy
                           .Arg<ffi::AnyBuffer>()  // x
                           .RemainingArgs()        // row_weights
                           .Ret<ffi::AnyBuffer>()  // values
                           .Ret<ffi::AnyBuffer>()  // values_t
                           .Ret<ffi::AnyBuffer>()  // amax
                           .Ret<ffi::AnyBuffer>()  // scales
                           .Ret<ffi::AnyBuffer>()  // scales_t
                           .Ret<ffi::AnyBuffer>()  // activated_t
                           .Ret<ffi::AnyBuffer>()  // activated_scales_t
                           .Ret<ffi::AnyBuffer>()  // sums
                           .Ret<ffi::AnyBuffer>()  // partial_sums
                           .Attrs<ActivationTileAttributes>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(measuring, amax,
                       bind_stream()
                           .Arg<ffi::AnyBuffer>()  // x
                           .RemainingArgs()        // row_weights
                           .Ret<ffi::AnyBuffer>()
                           .Attr<std::string_view>("activation"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(backward_measuring, backward_amax,
                       bind_stream()
                           .Arg<ffi::AnyBuffer>()  // dy
                           .Arg<ffi::AnyBuffer>()  // x
                           .RemainingArgs()        // row_weights
                           .Ret<ffi::AnyBuffer>()
                           .Attr<std::string_view>("activation"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const activation_quantize_handler = quantizing;
XLA_FFI_Handler* const activation_backward_quantize_handler = backward_quantizing;
XLA_FFI_Handler* const activation_quantize_by_tile_handler = tiling;
XLA_FFI_Handler* const activation_backward_quantize_by_tile_handler = backward_tiling;
XLA_FFI_Handler* const activation_amax_handler = measuring;
XLA_FFI_Handler* const activation_backward_amax_handler = backward_measuring;

}  // namespace jax_fp8
