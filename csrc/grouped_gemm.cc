#include "grouped_gemm.h"

#include <string>
#include <string_view>

#include "ffi.h"

namespace jax_fp8 {
namespace {

constexpr char kRowsOperation[] = "jax_fp8_grouped_gemm", kDepthOperation[] = "jax_fp8_grouped_gemm_weight_gradient";
constexpr std::string_view kByTile = "1d2d";
constexpr uintptr_t kAlignment = 16;

struct GroupedBuffers {
  ffi::AnyBuffer a, b, a_scale, b_scale, starts, d;
  std::string_view scaling;
};

// What only one of the operations has.
struct Further {
  bool side_by_side = false;
  const void* c = nullptr;
  float alpha = 1.0f;
};

constexpr int64_t tiles_of(int64_t size) { return divide_up(size, 128); }

constexpr int64_t filled_up(int64_t scales) { return round_up(scales, 4); }

bool fits(int64_t size) { return size <= kMostIndexed; }

// The checks of both kinds of groups, after those of the shapes of a and b. By tile, a_scale must have the shape
// `lines` and b_scale the shape `squares`.
void check_rest(Checks& checks, const GroupedBuffers& buffers, int64_t groups, const std::vector<int64_t>& d,
                const std::vector<int64_t>& lines, const std::vector<int64_t>& squares) {
  const bool by_tile = buffers.scaling == kByTile;
  checks
      .require(by_tile || buffers.scaling.empty(), "a_scale", buffers.a_scale,
               "come with scaling=1d2d, or with none for one scale (scaling is " + std::string(buffers.scaling) + ")")
      .require(!by_tile || (buffers.a.element_type() == ffi::F8E4M3FN && buffers.b.element_type() == ffi::F8E4M3FN),
               "b", buffers.b, "be float8_e4m3fn by tile, and so must a")
      .require(!(buffers.a.element_type() == ffi::F8E5M2 && buffers.b.element_type() == ffi::F8E5M2), "b", buffers.b,
               "be float8_e4m3fn when a is float8_e5m2 (the tensor cores do not multiply float8_e5m2 by float8_e5m2)")
      .dtype("a_scale", buffers.a_scale, {ffi::F32})
      .shape("a_scale", buffers.a_scale, by_tile ? lines : std::vector<int64_t>{})
      .dtype("b_scale", buffers.b_scale, {ffi::F32})
      .shape("b_scale", buffers.b_scale, by_tile ? squares : std::vector<int64_t>{})
      .require(groups >= 1 && groups <= kMaxGroups, "starts", buffers.starts,
               "be those of 1 to " + std::to_string(kMaxGroups) + " groups, not " + std::to_string(groups))
      .dtype("starts", buffers.starts, {ffi::S32})
      .shape("starts", buffers.starts, {sum_of(groups, 1)})
      .dtype("the result d", buffers.d, {ffi::BF16, ffi::F16, ffi::F32})
      .shape("the result d", buffers.d, d)
      .aligned("a", buffers.a, kAlignment)
      .aligned("b", buffers.b, kAlignment)
      .aligned("the result d", buffers.d, kAlignment);
}

Checks check_operands(const char* operation, const GroupedBuffers& buffers, size_t b_rank) {
  Checks checks(operation);
  checks.rank("a", buffers.a, 2)
      .dtype("a", buffers.a, {ffi::F8E4M3FN, ffi::F8E5M2})
      .rank("b", buffers.b, b_rank)
      .dtype("b", buffers.b, {ffi::F8E4M3FN, ffi::F8E5M2});
  return checks;
}

ffi::Error launch(const char* operation, cudaStream_t stream, const GroupedBuffers& buffers, Groups kind,
                  ProductShape shape, const Further& further) {
  if (is_empty(buffers.d)) return ffi::Error::Success();
  const grouped_gemm::Problem problem{
      .kind = kind,
      .shape = shape,
      .a = *fp8_type(buffers.a.element_type()),
      .b = *fp8_type(buffers.b.element_type()),
      .by_tile = buffers.scaling == kByTile,
      .d = *source_type(buffers.d.element_type()),
      .alpha = further.alpha,
      .side_by_side = further.side_by_side,
  };
  const grouped_gemm::Operands operands{
      .a = buffers.a.untyped_data(),
      .b = buffers.b.untyped_data(),
      .a_scale = static_cast<const float*>(buffers.a_scale.untyped_data()),
      .b_scale = static_cast<const float*>(buffers.b_scale.untyped_data()),
      .bias = nullptr,
      .c = further.c,
      .starts = static_cast<const int32_t*>(buffers.starts.untyped_data()),
      .d = buffers.d.untyped_data(),
  };
  if (!grouped_gemm::is_available()) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      std::string(operation) + ": grouped products need a GPU of compute capability 9.0");
  }
  const std::string failure = grouped_gemm::enqueue(problem, operands, stream);
  return failure.empty() ? ffi::Error::Success() : ffi::Error::Internal(std::string(operation) + ": " + failure);
}

ffi::Error multiply_rows(cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer a_scale,
                         ffi::AnyBuffer b_scale, ffi::AnyBuffer starts, ffi::Result<ffi::AnyBuffer> d,
                         std::string_view scaling, bool side_by_side) {
  const GroupedBuffers buffers{a, b, a_scale, b_scale, starts, *d, scaling};
  Checks checks = check_operands(kRowsOperation, buffers, 3);
  if (!checks.passed()) return checks.error();
  const int64_t rows = a.dimensions()[0], k = a.dimensions()[1], groups = b.dimensions()[0], n = b.dimensions()[1];
  checks
      .require(rows % kTileRows == 0 && k > 0 && k % 16 == 0 && fits(rows) && fits(k), "a", a,
               "have a first dim that is a multiple of 128, and a last dim that is a positive multiple of 16")
      .require(n % 16 == 0 && fits(n), "b", b, "have matrices with a number of rows that is a multiple of 16")
      .shape("b", b, {groups, n, k});
  check_rest(checks, buffers, groups, {rows, n}, {tiles_of(k), filled_up(rows)},
             {groups, tiles_of(n), filled_up(tiles_of(k))});
  if (!checks.passed()) return checks.error();
  const ProductShape shape = {int(rows), int(n), int(k), int(groups)};
  return launch(kRowsOperation, stream, buffers, Groups::kRows, shape, {.side_by_side = side_by_side});
}

ffi::Error multiply_depth(cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer a_scale,
                          ffi::AnyBuffer b_scale, ffi::AnyBuffer starts, ffi::RemainingArgs addends,
                          ffi::Result<ffi::AnyBuffer> d, std::string_view scaling, float alpha) {
  if (addends.size() > 1) {
    return ffi::Error::InvalidArgument(std::string(kDepthOperation) + ": must get at most c after starts, got " +
                                       std::to_string(addends.size()) + " operands more");
  }
  const GroupedBuffers buffers{a, b, a_scale, b_scale, starts, *d, scaling};
  Checks checks = check_operands(kDepthOperation, buffers, 2);
  checks.rank("the result d", *d, 3).finite("alpha", alpha);
  if (!checks.passed()) return checks.error();
  const int64_t m = a.dimensions()[0], rows = a.dimensions()[1], n = b.dimensions()[0], groups = d->dimensions()[0];
  checks
      .require(rows > 0 && rows % kTileDepth == 0 && fits(rows) && m % 16 == 0 && fits(m), "a", a,
               "have a first dim that is a multiple of 16, and a last dim that is a positive multiple of 128")
      .require(n % 16 == 0 && fits(n), "b", b, "have a first dim that is a multiple of 16")
      .shape("b", b, {n, rows});
  check_rest(checks, buffers, groups, {groups, m, n}, {tiles_of(rows), filled_up(m)},
             {tiles_of(n), filled_up(tiles_of(rows))});
  Further further{.alpha = alpha};
  if (addends.size() == 1) {
    const ffi::AnyBuffer c = *addends.get<ffi::AnyBuffer>(0);
    checks.dtype("c", c, {d->element_type()}).shape("c", c, {groups, m, n}).aligned("c", c, kAlignment);
    further.c = c.untyped_data();
  }
  if (!checks.passed()) return checks.error();
  const ProductShape shape = {int(m), int(n), int(rows), int(groups)};
  return launch(kDepthOperation, stream, buffers, Groups::kDepth, shape, further);
}

auto operands() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()   // a
      .Arg<ffi::AnyBuffer>()   // b
      .Arg<ffi::AnyBuffer>()   // a_scale
      .Arg<ffi::AnyBuffer>()   // b_scale
      .Arg<ffi::AnyBuffer>();  // starts
}

XLA_FFI_DEFINE_HANDLER(rows_handler, multiply_rows,
                       operands()
                           .Ret<ffi::AnyBuffer>()  // d
                           .Attr<std::string_view>("scaling")
                           .Attr<bool>("side_by_side"),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(depth_handler, multiply_depth,
                       operands()
                           .RemainingArgs()        // c
                           .Ret<ffi::AnyBuffer>()  // d
                           .Attr<std::string_view>("scaling")
                           .Attr<float>("alpha"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const grouped_gemm_handler = rows_handler;
XLA_FFI_Handler* const grouped_gemm_weight_gradient_handler = depth_handler;

}  // namespace jax_fp8
