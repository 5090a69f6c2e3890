#include "gemm.h"

#include <memory>
#include <optional>
#include <string_view>

#include "ffi.h"
#include "gemm_by_tile.h"
#include "gemm_plan.h"

namespace jax_fp8 {
namespace {

constexpr char kOperation[] = "jax_fp8_gemm";

// The state of one call site, from compilation on.
struct GemmState {
  static ffi::TypeId id;

  bool has_bias, has_c, fast_accumulation;
  cublaslt::ScaleMode a_scaling, b_scaling;
  float alpha;
  int64_t first_column;
  int candidate;
  GemmPlans plans;
};

ffi::TypeId GemmState::id = XLA_FFI_UNKNOWN_TYPE_ID;

struct GemmBuffers {
  ffi::AnyBuffer a, b, a_scale, b_scale;
  std::optional<ffi::AnyBuffer> bias, c;
  ffi::AnyBuffer d, workspace;
  int64_t first_column;  // the row of b and element of bias that make d's first column; b and bias may have more than d
  cublaslt::ScaleMode a_scaling, b_scaling;
};

// The scaling of a and b by the attribute's name. The first entry, an empty name, is one scale for each operand. 1d is
// one scale for each 1 x 128 elements along k, 2d one for each 128 x 128.
struct Scaling {
  std::string_view name;
  cublaslt::ScaleMode a, b;
};

constexpr Scaling kScalings[] = {
    {"", cublaslt::kOneScale, cublaslt::kOneScale},
    {"1d2d", cublaslt::kScalesOfLines, cublaslt::kScalesOfSquares},
    {"2d1d", cublaslt::kScalesOfSquares, cublaslt::kScalesOfLines},
    {"1d1d", cublaslt::kScalesOfLines, cublaslt::kScalesOfLines},
};

constexpr int64_t tiles_of(int64_t size) { return divide_up(size, kScaleTile); }

// The last dim of an array of scales, padded as cuBLASLt wants it.
constexpr int64_t filled_up(int64_t scales) { return round_up(scales, kScalesAlignment); }

void check_scales(Checks& checks, const char* name, const ffi::AnyBuffer& scales, cublaslt::ScaleMode mode,
                  int64_t rows, int64_t k) {
  if (mode == cublaslt::kOneScale) {
    checks.float32_scalar(name, scales);
  } else if (mode == cublaslt::kScalesOfLines) {
    checks.dtype(name, scales, {ffi::F32}).shape(name, scales, {tiles_of(k), filled_up(rows)});
  } else {
    checks.dtype(name, scales, {ffi::F32}).shape(name, scales, {tiles_of(rows), filled_up(tiles_of(k))});
  }
}

cudaDataType_t cuda_type(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F8E4M3FN: return CUDA_R_8F_E4M3;
    case ffi::F8E5M2: return CUDA_R_8F_E5M2;
    case ffi::BF16: return CUDA_R_16BF;
    case ffi::F16: return CUDA_R_16F;
    default: return CUDA_R_32F;
  }
}

// cuBLASLt adds a bfloat16 bias to a float32 product; otherwise the bias has the dtype of the result.
ffi::DataType bias_dtype(ffi::DataType d_dtype) { return d_dtype == ffi::F32 ? ffi::BF16 : d_dtype; }

ffi::Error check_shapes(const GemmBuffers& buffers, Addresses addresses) {
  Checks checks(kOperation, addresses);
  checks.rank("a", buffers.a, 2)
      .dtype("a", buffers.a, {ffi::F8E4M3FN, ffi::F8E5M2})
      .rank("b", buffers.b, 2)
      .dtype("b", buffers.b, {ffi::F8E4M3FN, ffi::F8E5M2});
  if (!checks.passed()) return checks.error();
  const int64_t m = buffers.a.dimensions()[0], k = buffers.a.dimensions()[1];
  checks.rank("the result d", buffers.d, 2).dtype("the result d", buffers.d, {ffi::BF16, ffi::F16, ffi::F32});
  if (!checks.passed()) return checks.error();
  const int64_t n = buffers.d.dimensions()[1], all = buffers.b.dimensions()[0];
  const ffi::DataType d_dtype = buffers.d.element_type();
  checks
      .require(!(buffers.a.element_type() == ffi::F8E5M2 && buffers.b.element_type() == ffi::F8E5M2), "b", buffers.b,
               "be float8_e4m3fn when a is float8_e5m2 (the tensor cores do not multiply float8_e5m2 by float8_e5m2)")
      .require(k > 0 && k % 16 == 0, "a", buffers.a, "have a contracting (last) dim that is a positive multiple of 16")
      .shape("b", buffers.b, {all, k})
      .require(n % 16 == 0, "the result d", buffers.d, "have a last dim that is a multiple of 16")
      .require(buffers.first_column % 16 == 0 && lies_within(buffers.first_column, n, all), "b", buffers.b,
               "have " + std::to_string(n) + " rows from first_column on, a multiple of 16, here " +
                   std::to_string(buffers.first_column))
      .shape("the result d", buffers.d, {m, n})
      .dtype("the result workspace", buffers.workspace, {ffi::U8})
      .shape("the result workspace", buffers.workspace, {kWorkspaceBytes});
  check_scales(checks, "a_scale", buffers.a_scale, buffers.a_scaling, m, k);
  // With one scale for each square, b_scale covers all rows of b. With one for each line, it covers only the rows that
  // this call multiplies.
  const bool has_squares = buffers.b_scaling == cublaslt::kScalesOfSquares;
  check_scales(checks, "b_scale", buffers.b_scale, buffers.b_scaling, has_squares ? all : n, k);
  checks.require(!has_squares || buffers.first_column % kScaleTile == 0, "b_scale", buffers.b_scale,
                 "have a scale for each line, not square, where first_column is no multiple of 128, here " +
                     std::to_string(buffers.first_column));
  if (buffers.bias) checks.dtype("bias", *buffers.bias, {bias_dtype(d_dtype)}).shape("bias", *buffers.bias, {all});
  if (buffers.c) checks.dtype("c", *buffers.c, {d_dtype}).shape("c", *buffers.c, {m, n});
  return checks.error();
}

ffi::Error check_addresses(const GemmBuffers& buffers) {
  Checks checks(kOperation);
  checks.aligned("a", buffers.a, kMinAlignment)
      .aligned("b", buffers.b, kMinAlignment)
      .aligned("the result d", buffers.d, kMinAlignment)
      .aligned("the result workspace", buffers.workspace, kFullAlignment);
  if (buffers.a_scaling != cublaslt::kOneScale) {
    checks.aligned("a_scale", buffers.a_scale, kMinAlignment).aligned("b_scale", buffers.b_scale, kMinAlignment);
  }
  if (buffers.bias) checks.aligned("bias", *buffers.bias, kMinAlignment);
  if (buffers.c) checks.aligned("c", *buffers.c, kMinAlignment);
  return checks.error();
}

GemmProblem problem_of(const GemmState& state, const GemmBuffers& buffers) {
  return {
      .m = buffers.a.dimensions()[0],
      .n = buffers.d.dimensions()[1],
      .k = buffers.a.dimensions()[1],
      .a_type = cuda_type(buffers.a.element_type()),
      .b_type = cuda_type(buffers.b.element_type()),
      .d_type = cuda_type(buffers.d.element_type()),
      .bias_type = cuda_type(bias_dtype(buffers.d.element_type())),
      .has_bias = state.has_bias,
      .has_c = state.has_c,
      .fast_accumulation = state.fast_accumulation,
      .alpha = state.alpha,
      .candidate = state.candidate,
      .a_scaling = state.a_scaling,
      .b_scaling = state.b_scaling,
  };
}

// The address `bytes` after the buffer's start; null where XLA passes no address, as it may before the first launch.
const void* skipping(const ffi::AnyBuffer& buffer, int64_t bytes) {
  const auto* start = static_cast<const uint8_t*>(buffer.untyped_data());
  return start == nullptr ? nullptr : start + bytes;
}

GemmOperands operands_of(const GemmBuffers& buffers) {
  const int64_t k = buffers.a.dimensions()[1];
  constexpr int64_t kBiasBytes = 2;  // bfloat16 or float16
  const bool has_squares = buffers.b_scaling == cublaslt::kScalesOfSquares;
  const int64_t row_of_scales = filled_up(tiles_of(k)) * static_cast<int64_t>(sizeof(float));
  return {
      .a = buffers.a.untyped_data(),
      .b = skipping(buffers.b, buffers.first_column * k),
      .a_scale = buffers.a_scale.untyped_data(),
      .b_scale = has_squares ? skipping(buffers.b_scale, buffers.first_column / kScaleTile * row_of_scales)
                             : buffers.b_scale.untyped_data(),
      .bias = buffers.bias ? skipping(*buffers.bias, buffers.first_column * kBiasBytes) : nullptr,
      .c = buffers.c ? buffers.c->untyped_data() : nullptr,
      .d = buffers.d.untyped_data(),
      .workspace = buffers.workspace.untyped_data(),
  };
}

// jax_fp8/tune/gemm_bench.py recognizes a rank past the end of the heuristic's list by kOutOfRange, not by the
// sentence.
ffi::Error error_of(const Failure& failure) {
  if (!failure) return ffi::Error::Success();
  const auto code = failure.off_the_list ? ffi::ErrorCode::kOutOfRange : ffi::ErrorCode::kInternal;
  return ffi::Error(code, std::string(kOperation) + ": " + failure.reason);
}

ffi::Error check_count(const GemmState& state, size_t addends) {
  const size_t expected = size_t{state.has_bias} + size_t{state.has_c};
  if (addends == expected) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(kOperation) + ": must be called with a, b, a_scale, b_scale" +
                                     (state.has_bias ? ", bias" : "") + (state.has_c ? ", c" : "") +
                                     " as its attributes has_bias and has_c say, got " + std::to_string(4 + addends) +
                                     " arguments");
}

GemmBuffers gather(const GemmState& state, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer a_scale,
                   ffi::AnyBuffer b_scale, ffi::RemainingArgs addends, ffi::AnyBuffer d, ffi::AnyBuffer workspace) {
  GemmBuffers buffers{a, b, a_scale, b_scale, std::nullopt, std::nullopt, d, workspace, state.first_column,
                      state.a_scaling, state.b_scaling};
  if (state.has_bias) buffers.bias = *addends.get<ffi::AnyBuffer>(0);
  if (state.has_c) buffers.c = *addends.get<ffi::AnyBuffer>(state.has_bias ? 1 : 0);
  return buffers;
}

ffi::ErrorOr<std::unique_ptr<GemmState>> instantiate(bool has_bias, bool has_c, bool fast_accumulation, float alpha,
                                                     int64_t first_column, int32_t candidate,
                                                     std::string_view scaling) {
  const Scaling* found = nullptr;
  for (const Scaling& known : kScalings) found = known.name == scaling ? &known : found;
  if (found == nullptr) {
    return ffi::Unexpected(error_of({"scaling must be 1d2d, 2d1d, 1d1d or empty, got " + std::string(scaling)}));
  }
  if (candidate < 0 || candidate >= kMaxCandidates) {
    return ffi::Unexpected(error_of({.reason = "candidate must be from 0 to " + std::to_string(kMaxCandidates - 1) +
                                               ", got " + std::to_string(candidate),
                                     .off_the_list = true}));
  }
  if (!std::isfinite(alpha)) return ffi::Unexpected(Checks(kOperation).finite("alpha", alpha).error());
  auto state = std::make_unique<GemmState>();
  state->has_bias = has_bias;
  state->has_c = has_c;
  state->fast_accumulation = fast_accumulation;
  state->alpha = alpha;
  state->first_column = first_column;
  state->candidate = candidate;
  state->a_scaling = found->a;
  state->b_scaling = found->b;
  return ffi::ErrorOr<std::unique_ptr<GemmState>>(std::move(state));
}

// XLA may pass other addresses here than to execute, so this stage does not check them.
ffi::Error initialize(GemmState* state, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer a_scale,
                      ffi::AnyBuffer b_scale, ffi::RemainingArgs addends, ffi::Result<ffi::AnyBuffer> d,
                      ffi::Result<ffi::AnyBuffer> workspace) {
  if (state->plans.prepared()) return ffi::Error::Success();
  if (ffi::Error error = check_count(*state, addends.size()); error.failure()) return error;
  const GemmBuffers buffers = gather(*state, a, b, a_scale, b_scale, addends, *d, *workspace);
  if (ffi::Error error = check_shapes(buffers, Addresses::kUnknown); error.failure()) return error;
  if (is_empty(*d)) return ffi::Error::Success();
  GemmProblem problem = problem_of(*state, buffers);
  if (own_problem(problem)) {
    if (problem.candidate == 0) return ffi::Error::Success();
    --problem.candidate;
  }
  return error_of(state->plans.prepare(problem, operands_of(buffers)));
}

ffi::Error execute(cudaStream_t stream, GemmState* state, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer a_scale,
                   ffi::AnyBuffer b_scale, ffi::RemainingArgs addends, ffi::Result<ffi::AnyBuffer> d,
                   ffi::Result<ffi::AnyBuffer> workspace) {
  if (ffi::Error error = check_count(*state, addends.size()); error.failure()) return error;
  const GemmBuffers buffers = gather(*state, a, b, a_scale, b_scale, addends, *d, *workspace);
  if (ffi::Error error = check_shapes(buffers, Addresses::kKnown); error.failure()) return error;
  if (is_empty(*d)) return ffi::Error::Success();
  if (ffi::Error error = check_addresses(buffers); error.failure()) return error;
  GemmProblem problem = problem_of(*state, buffers);
  if (const auto own = own_problem(problem)) {
    if (problem.candidate == 0) return error_of({enqueue_own(*own, operands_of(buffers), stream)});
    --problem.candidate;
  }
  return error_of(state->plans.enqueue(problem, operands_of(buffers), stream));
}

XLA_FFI_DEFINE_HANDLER(instantiate_handler, instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<bool>("has_bias")
                           .Attr<bool>("has_c")
                           .Attr<bool>("fast_accumulation")
                           .Attr<float>("alpha")
                           .Attr<int64_t>("first_column")
                           .Attr<int32_t>("candidate")
                           .Attr<std::string_view>("scaling"),
                       {ffi::Traits::kCmdBufferCompatible});

// XLA passes the same buffers to initialize and to execute.
template <typename Binding>
auto bind_buffers(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()   // a
      .template Arg<ffi::AnyBuffer>()   // b
      .template Arg<ffi::AnyBuffer>()   // a_scale
      .template Arg<ffi::AnyBuffer>()   // b_scale
      .RemainingArgs()                  // bias, c
      .template Ret<ffi::AnyBuffer>()   // d
      .template Ret<ffi::AnyBuffer>();  // workspace
}

XLA_FFI_DEFINE_HANDLER(initialize_handler, initialize,
                       bind_buffers(ffi::Ffi::BindInitialize().Ctx<ffi::State<GemmState>>()),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    execute_handler, execute,
    bind_buffers(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::State<GemmState>>()),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const gemm_instantiate_handler = instantiate_handler;
XLA_FFI_Handler* const gemm_initialize_handler = initialize_handler;
XLA_FFI_Handler* const gemm_execute_handler = execute_handler;

XLA_FFI_TypeId* gemm_state_type_id() { return &GemmState::id; }

const XLA_FFI_TypeInfo* gemm_state_type_info() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<GemmState>();
  return &info;
}

}  // namespace jax_fp8
