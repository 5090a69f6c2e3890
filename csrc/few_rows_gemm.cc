#include "few_rows_gemm.h"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ffi.h"

namespace jax_fp8 {
namespace {

using few_rows_gemm::kMostRows;
using few_rows_gemm::Scaling;

constexpr char kOperation[] = "jax_fp8_few_rows_gemm";
constexpr uintptr_t kAlignment = 16;

struct FewRowsBuffers {
  ffi::AnyBuffer a, b, a_scale, b_scale;
  std::optional<ffi::AnyBuffer> bias, c, norm_scale, norm_bias, d_scale;
  ffi::AnyBuffer d;
  std::optional<ffi::AnyBuffer> rows;
};

}  // namespace

// Attributes. first_column is the row of b and element of bias that make d's first column; b and bias may have more
// than d. a is normalized where norm is "layernorm" or "rmsnorm", and with `casts` cast by the element a_row of
// a_scale; the result `rows` is room for it, and no result of the operation. second_part and third_part are the first
// columns of these parts of d, 0 without them. With `casts_d`, d is cast by the element d_row of d_scale.
struct FewRowsRule {
  bool has_bias, has_c;
  float alpha;
  int64_t first_column;
  std::string_view scaling;
  int32_t config;
  std::string_view norm;
  float epsilon;
  bool casts;
  int32_t a_row;
  std::string_view activation;
  int64_t second_part, third_part;
  bool casts_d;
  int32_t d_row;

  bool prepares() const { return casts || !norm.empty(); }
};

}  // namespace jax_fp8

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_fp8::FewRowsRule, xla::ffi::StructMember<bool>("has_bias"), xla::ffi::StructMember<bool>("has_c"),
    xla::ffi::StructMember<float>("alpha"), xla::ffi::StructMember<int64_t>("first_column"),
    xla::ffi::StructMember<std::string_view>("scaling"), xla::ffi::StructMember<int32_t>("config"),
    xla::ffi::StructMember<std::string_view>("norm"), xla::ffi::StructMember<float>("epsilon"),
    xla::ffi::StructMember<bool>("casts"), xla::ffi::StructMember<int32_t>("a_row"),
    xla::ffi::StructMember<std::string_view>("activation"), xla::ffi::StructMember<int64_t>("second_part"),
    xla::ffi::StructMember<int64_t>("third_part"), xla::ffi::StructMember<bool>("casts_d"),
    xla::ffi::StructMember<int32_t>("d_row"));

namespace jax_fp8 {
namespace {

constexpr int64_t tiles_of(int64_t size) { return divide_up(size, few_rows_gemm::kChunk); }

// The last dim of an array of scales, padded as cuBLASLt wants it.
constexpr int64_t filled_up(int64_t scales) { return round_up(scales, 4); }

// By the attribute's name and the dtype of a in the product: 1d2d is one scale for each 1 x 128 of a and each 128 x 128
// of b, and 2d is one for each 128 x 128 of b.
std::optional<Scaling> scaling_of(std::string_view name, ffi::DataType a) {
  if (name.empty()) return Scaling::kOne;
  if (name == "1d2d" && a == ffi::F8E4M3FN) return Scaling::kLines;
  if (name == "2d" && a == ffi::BF16) return Scaling::kSquares;
  return std::nullopt;
}

// As cuBLASLt has it.
ffi::DataType bias_dtype(ffi::DataType d_dtype) { return d_dtype == ffi::F32 ? ffi::BF16 : d_dtype; }

// What only calls have that prepare a, or activate d.
void check_preparation(Checks& checks, const FewRowsBuffers& buffers, const FewRowsRule& rule) {
  const int64_t m = buffers.a.dimensions()[0], k = buffers.a.dimensions()[1];
  const int64_t most = rule.casts ? kMostRows : few_rows_gemm::kMostPreparedRows;
  checks
      .require(m <= most, "a", buffers.a, "have at most " + std::to_string(most) + " rows to be normalized")
      .dtype("a", buffers.a, {ffi::BF16})
      .require(!rule.casts || rule.scaling.empty(), "a", buffers.a, "be cast with one scale only")
      .not_negative("epsilon", rule.epsilon);
  if (buffers.norm_scale) {
    checks.dtype("norm_scale", *buffers.norm_scale, {ffi::F32}).shape("norm_scale", *buffers.norm_scale, {k});
    checks.aligned("norm_scale", *buffers.norm_scale, kAlignment);
  }
  if (buffers.norm_bias) {
    checks.dtype("norm_bias", *buffers.norm_bias, {ffi::F32}).shape("norm_bias", *buffers.norm_bias, {k});
    checks.aligned("norm_bias", *buffers.norm_bias, kAlignment);
  }
}

void check_activation(Checks& checks, const FewRowsBuffers& buffers, const FewRowsRule& rule) {
  const NamedActivation* const found = find_activation(rule.activation);
  checks
      .require(found, "the result d", buffers.d,
               "come with one of the known activations, not \"" + std::string(rule.activation) + "\"")
      .require(!rule.has_c, "the result d", buffers.d, "come without c where it is activated");
  if (!found || !found->gated) return;
  checks
      .require(rule.first_column == 0 && 2 * buffers.d.dimensions()[1] == buffers.b.dimensions()[0], "the result d",
               buffers.d, "have half as many columns as b has rows, gate and linear")
      .require(rule.scaling.empty(), "b", buffers.b, "have one scale where gates are activated");
}

// A scale, which may be one of several.
void check_one_of(Checks& checks, const char* name, const ffi::AnyBuffer& scales, const char* row_name, int32_t row) {
  const auto shape = shape_of(scales);
  checks.require(shape.size() <= 1 && row >= 0 && row < (shape.empty() ? 1 : shape[0]), name, scales,
                 "be one scale, or several of which one is " + std::string(row_name) + ", here " +
                     std::to_string(row));
}

ffi::Error check(const FewRowsBuffers& buffers, const FewRowsRule& rule) {
  Checks checks(kOperation);
  checks.rank("a", buffers.a, 2)
      .dtype("a", buffers.a, {ffi::F8E4M3FN, ffi::BF16})
      .rank("b", buffers.b, 2)
      .dtype("b", buffers.b, {ffi::F8E4M3FN})
      .rank("the result d", buffers.d, 2);
  rule.casts_d ? checks.dtype("the result d", buffers.d, {ffi::F8E4M3FN})
               : checks.dtype("the result d", buffers.d, {ffi::BF16, ffi::F16, ffi::F32});
  if (!checks.passed()) return checks.error();
  const int64_t m = buffers.a.dimensions()[0], k = buffers.a.dimensions()[1];
  const int64_t n = buffers.d.dimensions()[1], all = buffers.b.dimensions()[0];
  const auto scaling = scaling_of(rule.scaling, buffers.a.element_type());
  checks.require(m <= kMostRows, "a", buffers.a, "have at most " + std::to_string(kMostRows) + " rows")
      .require(k > 0 && k % 16 == 0 && k <= few_rows_gemm::kMostDepth, "a", buffers.a,
               "have a contracting (last) dim that is a positive multiple of 16, at most 2**30")
      .require(all <= kMostIndexed, "b", buffers.b, "have at most " + std::to_string(kMostIndexed) + " rows")
      .shape("b", buffers.b, {all, k})
      .require(n % 16 == 0 && n <= kMostIndexed, "the result d", buffers.d,
               "have a last dim that is a multiple of 16")
      .require(rule.first_column % 16 == 0 && lies_within(rule.first_column, n, all), "b", buffers.b,
               "have " + std::to_string(n) + " rows from first_column on, a multiple of 16, here " +
                   std::to_string(rule.first_column))
      .shape("the result d", buffers.d, {m, n})
      .require(scaling.has_value(), "a", buffers.a,
               "come with scaling=1d2d if it is float8_e4m3fn, with scaling=2d if it is bfloat16, or with none for one "
               "scale (scaling is " + std::string(rule.scaling) + ")")
      .finite("alpha", rule.alpha)
      .dtype("a_scale", buffers.a_scale, {ffi::F32})
      .dtype("b_scale", buffers.b_scale, {ffi::F32});
  if (!checks.passed()) return checks.error();
  using Shape = std::vector<int64_t>;
  const bool has_squares = *scaling != Scaling::kOne;
  if (*scaling == Scaling::kLines) {
    checks.shape("a_scale", buffers.a_scale, Shape{tiles_of(k), filled_up(m)});
  } else {
    check_one_of(checks, "a_scale", buffers.a_scale, "a_row", rule.a_row);
  }
  if (rule.casts_d) {
    checks.dtype("d_scale", *buffers.d_scale, {ffi::F32});
    check_one_of(checks, "d_scale", *buffers.d_scale, "d_row", rule.d_row);
  }
  if (buffers.rows) {
    checks.dtype("the result rows", *buffers.rows, {ffi::F8E4M3FN})
        .shape("the result rows", *buffers.rows, {m, k})
        .aligned("the result rows", *buffers.rows, kAlignment);
  }
  // One scale for each square covers all rows of b.
  checks.shape("b_scale", buffers.b_scale, has_squares ? Shape{tiles_of(all), filled_up(tiles_of(k))} : Shape{})
      .require(!has_squares || rule.first_column % few_rows_gemm::kChunk == 0, "b_scale", buffers.b_scale,
               "be one scale where first_column is no multiple of 128, here " + std::to_string(rule.first_column));
  const ffi::DataType d_dtype = rule.casts_d ? ffi::BF16 : buffers.d.element_type();
  if (buffers.bias) checks.dtype("bias", *buffers.bias, {bias_dtype(d_dtype)}).shape("bias", *buffers.bias, {all});
  if (buffers.c) checks.dtype("c", *buffers.c, {d_dtype}).shape("c", *buffers.c, {m, n});
  checks.aligned("a", buffers.a, kAlignment)
      .aligned("b", buffers.b, kAlignment)
      .aligned("the result d", buffers.d, kAlignment);
  if (*scaling == Scaling::kLines) checks.aligned("a_scale", buffers.a_scale, kAlignment);
  if (buffers.bias) checks.aligned("bias", *buffers.bias, kAlignment);
  if (buffers.c) checks.aligned("c", *buffers.c, kAlignment);
  const int64_t second = rule.second_part, third = rule.third_part;
  const bool in_order = second >= 0 && second < std::max<int64_t>(n, 1) &&
                        (third == 0 || (third > second && second > 0 && third < n)) && second % 16 == 0 &&
                        third % 16 == 0;
  checks.require(in_order, "the result d", buffers.d,
                 "have parts that begin at multiples of 16, in order, here " + std::to_string(second) + " and " +
                     std::to_string(third))
      .require(!rule.has_c || second == 0, "the result d", buffers.d, "be one part where c is added");
  if (rule.prepares()) check_preparation(checks, buffers, rule);
  if (!rule.activation.empty()) check_activation(checks, buffers, rule);
  return checks.error();
}

const float* floats_of(const std::optional<ffi::AnyBuffer>& buffer) {
  return buffer ? static_cast<const float*>(buffer->untyped_data()) : nullptr;
}

few_rows_gemm::Operands operands_of(const FewRowsBuffers& buffers, const FewRowsRule& rule) {
  const int64_t k = buffers.a.dimensions()[1];
  constexpr int kBiasBytes = 2;  // bfloat16 or float16
  const auto* const b = static_cast<const uint8_t*>(buffers.b.untyped_data());
  const auto* const b_scale = static_cast<const float*>(buffers.b_scale.untyped_data());
  const bool has_lines = rule.scaling == "1d2d";
  const int64_t squares = rule.scaling.empty() ? 0 : rule.first_column / few_rows_gemm::kChunk;
  const void* bias = nullptr;
  if (buffers.bias) {
    bias = static_cast<const uint8_t*>(buffers.bias->untyped_data()) + rule.first_column * kBiasBytes;
  }
  return {
      .a = buffers.a.untyped_data(),
      .b = b + rule.first_column * k,
      .a_scale = static_cast<const float*>(buffers.a_scale.untyped_data()) + (has_lines ? 0 : rule.a_row),
      .b_scale = b_scale + squares * filled_up(tiles_of(k)),
      .bias = bias,
      .c = buffers.c ? buffers.c->untyped_data() : nullptr,
      .d = buffers.d.untyped_data(),
      .norm_scale = floats_of(buffers.norm_scale),
      .norm_bias = floats_of(buffers.norm_bias),
      .rows = buffers.rows ? buffers.rows->untyped_data() : nullptr,
      .d_scale = rule.casts_d ? floats_of(buffers.d_scale) + rule.d_row : nullptr,
  };
}

few_rows_gemm::Problem problem_of(const FewRowsBuffers& buffers, const FewRowsRule& rule) {
  const NamedActivation* const activation = find_activation(rule.activation);
  const bool gated = activation && activation->gated;
  return {
      .m = static_cast<int>(buffers.a.dimensions()[0]),
      .n = static_cast<int>(buffers.d.dimensions()[1]) * (gated ? 2 : 1),
      .k = static_cast<int>(buffers.a.dimensions()[1]),
      .a_is_bfloat16 = buffers.a.element_type() == ffi::BF16 && !rule.casts,
      .scaling = *scaling_of(rule.scaling, buffers.a.element_type()),
      .d = rule.casts_d ? SourceType::kBFloat16 : *source_type(buffers.d.element_type()),
      .alpha = rule.alpha,
      .config = rule.config,
      .preparation = {.normalizes = !rule.norm.empty(), .casts = rule.casts, .epsilon = rule.epsilon},
      .casts_d = rule.casts_d,
      .activates = activation != nullptr,
      .gated = gated,
      .activation = activation ? activation->activation : Activation::kGelu,
      .part_starts = {static_cast<int>(rule.second_part), static_cast<int>(rule.third_part)},
  };
}

ffi::Error multiply(cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer a_scale,
                    ffi::AnyBuffer b_scale, ffi::RemainingArgs further, ffi::Result<ffi::AnyBuffer> d,
                    ffi::RemainingRets more, FewRowsRule rule) {
  FewRowsBuffers buffers{a, b, a_scale, b_scale, {}, {}, {}, {}, {}, *d, {}};
  if (!rule.norm.empty() && rule.norm != "layernorm" && rule.norm != "rmsnorm") {
    return ffi::Error::InvalidArgument(std::string(kOperation) +
                                       ": norm must be layernorm, rmsnorm or empty, got " + std::string(rule.norm));
  }
  std::vector<std::optional<ffi::AnyBuffer>*> wanted;
  std::string names;
  const auto want = [&](bool present, std::optional<ffi::AnyBuffer>& buffer, const char* name) {
    if (present) wanted.push_back(&buffer), names += std::string(", ") + name;
  };
  want(rule.has_bias, buffers.bias, "bias");
  want(rule.has_c, buffers.c, "c");
  want(!rule.norm.empty(), buffers.norm_scale, "norm_scale");
  want(rule.norm == "layernorm", buffers.norm_bias, "norm_bias");
  want(rule.casts_d, buffers.d_scale, "d_scale");
  if (further.size() != wanted.size()) {
    return ffi::Error::InvalidArgument(std::string(kOperation) + ": must be called with a, b, a_scale, b_scale" +
                                       names + " as its attributes has_bias, has_c, norm and casts_d say, got " +
                                       std::to_string(4 + further.size()) + " arguments");
  }
  for (size_t i = 0; i < wanted.size(); ++i) *wanted[i] = *further.get<ffi::AnyBuffer>(i);
  if (more.size() != (rule.casts ? 1 : 0)) {
    return ffi::Error::InvalidArgument(std::string(kOperation) + ": must have the results d" +
                                       (rule.casts ? " and rows" : "") + " as its attribute casts says, got " +
                                       std::to_string(1 + more.size()) + " results");
  }
  if (rule.casts) buffers.rows = **more.get<ffi::AnyBuffer>(0);
  if (ffi::Error error = check(buffers, rule); error.failure()) return error;
  if (is_empty(*d)) return ffi::Error::Success();
  const std::string failure =
      few_rows_gemm::enqueue(problem_of(buffers, rule), operands_of(buffers, rule), stream);
  return failure.empty() ? ffi::Error::Success() : ffi::Error::Internal(std::string(kOperation) + ": " + failure);
}

XLA_FFI_DEFINE_HANDLER(handler, multiply,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // a
                           .Arg<ffi::AnyBuffer>()  // b
                           .Arg<ffi::AnyBuffer>()  // a_scale
                           .Arg<ffi::AnyBuffer>()  // b_scale
                           .RemainingArgs()        // bias, c, norm_scale, norm_bias, d_scale
                           .Ret<ffi::AnyBuffer>()  // d
                           .RemainingRets()        // rows
                           .Attrs<FewRowsRule>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const few_rows_gemm_handler = handler;

}  // namespace jax_fp8
