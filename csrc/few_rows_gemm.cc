#include "few_rows_gemm.h"

#include <optional>
#include <string>
#include <string_view>

#include "ffi.h"

namespace jax_fp8 {
namespace {

using few_rows_gemm::kMostRows;
using few_rows_gemm::Scaling;

constexpr char kOperation[] = "jax_fp8_few_rows_gemm";
constexpr uintptr_t kAlignment = 16;

struct FewRowsBuffers {
  ffi::AnyBuffer a, b, a_scale, b_scale;
  std::optional<ffi::AnyBuffer> bias, c;
  ffi::AnyBuffer d;
};

// Attributes. first_column is the row of b and element of bias that make d's first column; b and bias may have more
// than d.
struct FewRowsRule {
  bool has_bias, has_c;
  float alpha;
  int64_t first_column;
  std::string_view scaling;
  int32_t config;
};

constexpr int64_t tiles_of(int64_t size) { return divide_up(size, few_rows_gemm::kChunk); }

// The last dim of an array of scales, padded as cuBLASLt wants it.
constexpr int64_t filled_up(int64_t scales) { return round_up(scales, 4); }

// By the attribute's name and the dtype of a: 1d2d is one scale for each 1 x 128 of a and each 128 x 128 of b, and 2d
// is one for each 128 x 128 of b.
std::optional<Scaling> scaling_of(std::string_view name, ffi::DataType a) {
  if (name.empty()) return Scaling::kOne;
  if (name == "1d2d" && a == ffi::F8E4M3FN) return Scaling::kLines;
  if (name == "2d" && a == ffi::BF16) return Scaling::kSquares;
  return std::nullopt;
}

// As cuBLASLt has it.
ffi::DataType bias_dtype(ffi::DataType d_dtype) { return d_dtype == ffi::F32 ? ffi::BF16 : d_dtype; }

ffi::Error check(const FewRowsBuffers& buffers, const FewRowsRule& rule) {
  Checks checks(kOperation);
  checks.rank("a", buffers.a, 2)
      .dtype("a", buffers.a, {ffi::F8E4M3FN, ffi::BF16})
      .rank("b", buffers.b, 2)
      .dtype("b", buffers.b, {ffi::F8E4M3FN})
      .rank("the result d", buffers.d, 2)
      .dtype("the result d", buffers.d, {ffi::BF16, ffi::F16, ffi::F32});
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
  checks.shape("a_scale", buffers.a_scale, *scaling == Scaling::kLines ? Shape{tiles_of(k), filled_up(m)} : Shape{})
      // One scale for each square covers all rows of b.
      .shape("b_scale", buffers.b_scale, has_squares ? Shape{tiles_of(all), filled_up(tiles_of(k))} : Shape{})
      .require(!has_squares || rule.first_column % few_rows_gemm::kChunk == 0, "b_scale", buffers.b_scale,
               "be one scale where first_column is no multiple of 128, here " + std::to_string(rule.first_column));
  const ffi::DataType d_dtype = buffers.d.element_type();
  if (buffers.bias) checks.dtype("bias", *buffers.bias, {bias_dtype(d_dtype)}).shape("bias", *buffers.bias, {all});
  if (buffers.c) checks.dtype("c", *buffers.c, {d_dtype}).shape("c", *buffers.c, {m, n});
  checks.aligned("a", buffers.a, kAlignment)
      .aligned("b", buffers.b, kAlignment)
      .aligned("the result d", buffers.d, kAlignment);
  if (*scaling == Scaling::kLines) checks.aligned("a_scale", buffers.a_scale, kAlignment);
  if (buffers.bias) checks.aligned("bias", *buffers.bias, kAlignment);
  if (buffers.c) checks.aligned("c", *buffers.c, kAlignment);
  return checks.error();
}

few_rows_gemm::Operands operands_of(const FewRowsBuffers& buffers, const FewRowsRule& rule) {
  const int64_t k = buffers.a.dimensions()[1];
  constexpr int64_t kBiasBytes = 2;  // bfloat16 or float16
  const auto* const b = static_cast<const uint8_t*>(buffers.b.untyped_data());
  const auto* const b_scale = static_cast<const float*>(buffers.b_scale.untyped_data());
  const int64_t squares = rule.scaling.empty() ? 0 : rule.first_column / few_rows_gemm::kChunk;
  const void* bias = nullptr;
  if (buffers.bias) {
    bias = static_cast<const uint8_t*>(buffers.bias->untyped_data()) + rule.first_column * kBiasBytes;
  }
  return {
      .a = buffers.a.untyped_data(),
      .b = b + rule.first_column * k,
      .a_scale = static_cast<const float*>(buffers.a_scale.untyped_data()),
      .b_scale = b_scale + squares * filled_up(tiles_of(k)),
      .bias = bias,
      .c = buffers.c ? buffers.c->untyped_data() : nullptr,
      .d = buffers.d.untyped_data(),
  };
}

ffi::Error multiply(cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer a_scale,
                    ffi::AnyBuffer b_scale, ffi::RemainingArgs addends, ffi::Result<ffi::AnyBuffer> d, bool has_bias,
                    bool has_c, float alpha, int64_t first_column, std::string_view scaling, int32_t config) {
  const FewRowsRule rule{has_bias, has_c, alpha, first_column, scaling, config};
  if (addends.size() != size_t{has_bias} + size_t{has_c}) {
    return ffi::Error::InvalidArgument(std::string(kOperation) + ": must be called with a, b, a_scale, b_scale" +
                                       (has_bias ? ", bias" : "") + (has_c ? ", c" : "") +
                                       " as its attributes has_bias and has_c say, got " +
                                       std::to_string(4 + addends.size()) + " arguments");
  }
  FewRowsBuffers buffers{a, b, a_scale, b_scale, std::nullopt, std::nullopt, *d};
  if (has_bias) buffers.bias = *addends.get<ffi::AnyBuffer>(0);
  if (has_c) buffers.c = *addends.get<ffi::AnyBuffer>(has_bias ? 1 : 0);
  if (ffi::Error error = check(buffers, rule); error.failure()) return error;
  if (is_empty(*d)) return ffi::Error::Success();
  const few_rows_gemm::Problem problem{
      .m = static_cast<int>(a.dimensions()[0]),
      .n = static_cast<int>(d->dimensions()[1]),
      .k = static_cast<int>(a.dimensions()[1]),
      .a_is_bfloat16 = a.element_type() == ffi::BF16,
      .scaling = *scaling_of(scaling, a.element_type()),
      .d = *source_type(d->element_type()),
      .alpha = alpha,
      .config = config,
  };
  const std::string failure = few_rows_gemm::enqueue(problem, operands_of(buffers, rule), stream);
  return failure.empty() ? ffi::Error::Success() : ffi::Error::Internal(std::string(kOperation) + ": " + failure);
}

XLA_FFI_DEFINE_HANDLER(handler, multiply,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // a
                           .Arg<ffi::AnyBuffer>()  // b
                           .Arg<ffi::AnyBuffer>()  // a_scale
                           .Arg<ffi::AnyBuffer>()  // b_scale
                           .RemainingArgs()        // bias, c
                           .Ret<ffi::AnyBuffer>()  // d
                           .Attr<bool>("has_bias")
                           .Attr<bool>("has_c")
                           .Attr<float>("alpha")
                           .Attr<int64_t>("first_column")
                           .Attr<std::string_view>("scaling")
                           .Attr<int32_t>("config"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const few_rows_gemm_handler = handler;

}  // namespace jax_fp8
