#include "quantize.h"

#include "by_tile_ffi.h"
#include "column_sums_ffi.h"
#include "ffi.h"
#include "scale_source_ffi.h"

namespace jax_fp8 {
namespace {

constexpr char kQuantize[] = "jax_fp8_quantize";
constexpr char kQuantizeTranspose[] = "jax_fp8_quantize_transpose";
constexpr char kQuantizeTransposeSums[] = "jax_fp8_quantize_transpose_sums";
constexpr char kQuantizeByTile[] = "jax_fp8_quantize_by_tile";
constexpr char kQuantizeByTileSums[] = "jax_fp8_quantize_by_tile_sums";

struct QuantizeBuffers {
  std::vector<ffi::AnyBuffer> x;  // matrices side by side, at least one
  ffi::AnyBuffer source, values, amax, scale;
};

// The operands in order: the first matrix, the source of the scale, and further matrices.
std::vector<ffi::AnyBuffer> matrices_of(ffi::AnyBuffer first, ffi::RemainingArgs further) {
  std::vector<ffi::AnyBuffer> matrices{first};
  for (size_t i = 0; i < further.size(); ++i) matrices.push_back(*further.get<ffi::AnyBuffer>(i));
  return matrices;
}

// Adds up the columns of all matrices in `cols`.
Checks check_matrices(const char* operation, const std::vector<ffi::AnyBuffer>& matrices, int64_t& cols) {
  Checks checks(operation);
  checks.require(matrices.size() <= kMaxMatrices, "x", matrices[0],
                 "come in at most " + std::to_string(kMaxMatrices) + " matrices side by side");
  for (const ffi::AnyBuffer& x : matrices) {
    checks.rank("x", x, 2).dtype("x", x, {ffi::F32, ffi::BF16, ffi::F16});
    if (!checks.passed()) return checks;
    cols = sum_of(cols, x.dimensions()[1]);
    checks.dtype("x", x, {matrices[0].element_type()}).shape("x", x, {matrices[0].dimensions()[0], x.dimensions()[1]});
  }
  return checks;
}

Checks check(const char* operation, const QuantizeBuffers& buffers, const ScaleRule& rule) {
  int64_t cols = 0;
  Checks checks = check_matrices(operation, buffers.x, cols);
  if (!checks.passed()) return checks;
  check_source(checks, buffers.source, rule)
      .dtype("the result values", buffers.values, {ffi::F8E4M3FN, ffi::F8E5M2})
      .shape("the result values", buffers.values, {buffers.x[0].dimensions()[0], cols})
      .float32_scalar("the result amax", buffers.amax)
      .float32_scalar("the result scale", buffers.scale);
  return checks;
}

Matrices side_by_side(const std::vector<ffi::AnyBuffer>& buffers) {
  Matrices matrices{};
  int64_t end = 0;
  for (size_t i = 0; i < kMaxMatrices; ++i) {
    if (i < buffers.size()) {
      matrices.x[i] = buffers[i].untyped_data();
      end += buffers[i].dimensions()[1];
    }
    matrices.ends[i] = end;
  }
  return matrices;
}

QuantizeArguments arguments_of(const QuantizeBuffers& buffers, const ScaleRule& rule) {
  return {
      .x = side_by_side(buffers.x),
      .x_type = *source_type(buffers.x[0].element_type()),
      .source = {.array = buffers.source.typed_data<float>(), .rule = rule},
      .format = *fp8_type(buffers.values.element_type()),
      .values = static_cast<uint8_t*>(buffers.values.untyped_data()),
      .values_t = nullptr,
      .amax = buffers.amax.typed_data<float>(),
      .scale = buffers.scale.typed_data<float>(),
      .sums = {},
      .rows = buffers.values.dimensions()[0],
      .cols = buffers.values.dimensions()[1],
  };
}

ffi::Error quantize(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer source, ffi::Result<ffi::AnyBuffer> values,
                    ffi::Result<ffi::AnyBuffer> amax, ffi::Result<ffi::AnyBuffer> scale, ScaleRule rule) {
  const QuantizeBuffers buffers{{x}, source, *values, *amax, *scale};
  const Checks checks = check(kQuantize, buffers, rule);
  if (!checks.passed()) return checks.error();
  return launch_result(kQuantize, launch_quantize(arguments_of(buffers, rule), stream));
}

Checks check_both(const char* operation, const QuantizeBuffers& buffers, ffi::AnyBuffer values_t,
                  const ScaleRule& rule) {
  Checks checks = check(operation, buffers, rule);
  if (checks.passed()) {
    checks.matrix("the result values", buffers.values)
        .dtype("the result values_t", values_t, {buffers.values.element_type()})
        .shape("the result values_t", values_t, {buffers.values.dimensions()[1], buffers.values.dimensions()[0]});
  }
  return checks;
}

ffi::Error quantize_transpose(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer source, ffi::RemainingArgs further,
                              ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> values_t,
                              ffi::Result<ffi::AnyBuffer> amax, ffi::Result<ffi::AnyBuffer> scale, ScaleRule rule) {
  const QuantizeBuffers buffers{matrices_of(x, further), source, *values, *amax, *scale};
  const Checks checks = check_both(kQuantizeTranspose, buffers, *values_t, rule);
  if (!checks.passed()) return checks.error();
  QuantizeArguments arguments = arguments_of(buffers, rule);
  arguments.values_t = static_cast<uint8_t*>(values_t->untyped_data());
  return launch_result(kQuantizeTranspose, launch_quantize_transpose(arguments, stream));
}

ffi::Error quantize_transpose_sums(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer source,
                                   ffi::RemainingArgs further, ffi::Result<ffi::AnyBuffer> values,
                                   ffi::Result<ffi::AnyBuffer> values_t, ffi::Result<ffi::AnyBuffer> amax,
                                   ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::AnyBuffer> sums,
                                   ffi::Result<ffi::AnyBuffer> partial_sums, ScaleRule rule) {
  const QuantizeBuffers buffers{matrices_of(x, further), source, *values, *amax, *scale};
  Checks checks = check_both(kQuantizeTransposeSums, buffers, *values_t, rule);
  if (checks.passed()) check_sums(checks, *sums, *partial_sums, values->dimensions()[0], values->dimensions()[1]);
  if (!checks.passed()) return checks.error();
  QuantizeArguments arguments = arguments_of(buffers, rule);
  arguments.values_t = static_cast<uint8_t*>(values_t->untyped_data());
  arguments.sums = {.result = sums->typed_data<float>(), .partial = partial_sums->typed_data<float>()};
  return launch_result(kQuantizeTransposeSums, launch_quantize_transpose(arguments, stream));
}

// ---- by tiles -------------------------------------------------------------------------------------------------------

ffi::Error quantize_by_tile(const char* operation, cudaStream_t stream, const std::vector<ffi::AnyBuffer>& x,
                            const TileBuffers& buffers, const ffi::AnyBuffer* sums, const ffi::AnyBuffer* partial_sums,
                            const TileRule& rule) {
  int64_t cols = 0;
  Checks checks = check_matrices(operation, x, cols);
  if (!checks.passed()) return checks.error();
  const int64_t rows = x[0].dimensions()[0];
  checks.require(rows <= kMostIndexed && cols <= kMostIndexed, "x", x[0],
                 "have at most " + std::to_string(kMostIndexed) + " rows and columns together");
  check_by_tile(checks, buffers, rows, cols, rule);
  if (sums) check_sums(checks, *sums, *partial_sums, rows, cols);
  if (!checks.passed()) return checks.error();
  const QuantizeByTileArguments arguments{
      .x = side_by_side(x),
      .x_type = *source_type(x[0].element_type()),
      .cast = cast_of(buffers, rule),
      .sums = sums ? ColumnSums{sums->typed_data<float>(), partial_sums->typed_data<float>()} : ColumnSums{},
      .rows = rows,
      .cols = cols,
  };
  return launch_result(operation, launch_quantize_by_tile(arguments, stream));
}

ffi::Error quantize_tiles(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs further,
                          ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> values_t,
                          ffi::Result<ffi::AnyBuffer> amax, ffi::Result<ffi::AnyBuffer> scales,
                          ffi::Result<ffi::AnyBuffer> scales_t, TileRule rule) {
  return quantize_by_tile(kQuantizeByTile, stream, matrices_of(x, further),
                          {*values, *values_t, *amax, *scales, *scales_t}, nullptr, nullptr, rule);
}

ffi::Error quantize_tiles_sums(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs further,
                               ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> values_t,
                               ffi::Result<ffi::AnyBuffer> amax, ffi::Result<ffi::AnyBuffer> scales,
                               ffi::Result<ffi::AnyBuffer> scales_t, ffi::Result<ffi::AnyBuffer> sums,
                               ffi::Result<ffi::AnyBuffer> partial_sums, TileRule rule) {
  return quantize_by_tile(kQuantizeByTileSums, stream, matrices_of(x, further),
                          {*values, *values_t, *amax, *scales, *scales_t}, &*sums, &*partial_sums, rule);
}

// ---- bindings -------------------------------------------------------------------------------------------------------

XLA_FFI_DEFINE_HANDLER(plain, quantize, BoundByParameters(), {ffi::Traits::kCmdBufferCompatible});

// The arguments and results that both casts with a transpose share.
auto bind_transposing() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()   // x
      .Arg<ffi::AnyBuffer>()   // source
      .RemainingArgs()         // further matrices
      .Ret<ffi::AnyBuffer>()   // values
      .Ret<ffi::AnyBuffer>()   // values_t
      .Ret<ffi::AnyBuffer>()   // amax
      .Ret<ffi::AnyBuffer>();  // scale
}

XLA_FFI_DEFINE_HANDLER(transposing, quantize_transpose, bind_transposing().Attrs<ScaleRule>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(summing, quantize_transpose_sums,
                       bind_transposing()
                           .Ret<ffi::AnyBuffer>()  // sums
                           .Ret<ffi::AnyBuffer>()  // partial_sums
                           .Attrs<ScaleRule>(),
                       {ffi::Traits::kCmdBufferCompatible});

// The arguments and results that both casts by tiles share.
auto bind_tiling() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()   // x
      .RemainingArgs()         // further matrices
      .Ret<ffi::AnyBuffer>()   // values
      .Ret<ffi::AnyBuffer>()   // values_t
      .Ret<ffi::AnyBuffer>()   // amax
      .Ret<ffi::AnyBuffer>()   // scales
      .Ret<ffi::AnyBuffer>();  // scales_t
}

XLA_FFI_DEFINE_HANDLER(tiling, quantize_tiles, bind_tiling().Attrs<TileRule>(), {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(tiling_summing, quantize_tiles_sums,
                       bind_tiling()
                           .Ret<ffi::AnyBuffer>()  // sums
                           .Ret<ffi::AnyBuffer>()  // partial_sums
                           .Attrs<TileRule>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const quantize_handler = plain;
XLA_FFI_Handler* const quantize_transpose_handler = transposing;
XLA_FFI_Handler* const quantize_transpose_sums_handler = summing;
XLA_FFI_Handler* const quantize_by_tile_handler = tiling;
XLA_FFI_Handler* const quantize_by_tile_sums_handler = tiling_summing;

}  // namespace jax_fp8
