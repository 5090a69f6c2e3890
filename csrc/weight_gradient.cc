#include "weight_gradient.h"

#include <memory>
#include <optional>

#include "ffi.h"
#include "gemm_plan.h"

namespace jax_fp8 {
namespace {

constexpr char kOperation[] = "jax_fp8_weight_gradient";

// The state of one call site, from compilation on.
struct WeightGradientState {
  static ffi::TypeId id;
  GemmPlans plans;
};

ffi::TypeId WeightGradientState::id = XLA_FFI_UNKNOWN_TYPE_ID;

struct WeightGradientBuffers {
  ffi::AnyBuffer dy, x;
  std::optional<ffi::AnyBuffer> total;
  ffi::AnyBuffer d, workspace;
};

WeightGradientBuffers gather(ffi::AnyBuffer dy, ffi::AnyBuffer x, ffi::RemainingArgs total, ffi::AnyBuffer d,
                             ffi::AnyBuffer workspace) {
  WeightGradientBuffers buffers{dy, x, std::nullopt, d, workspace};
  if (total.size() > 0) buffers.total = *total.get<ffi::AnyBuffer>(0);
  return buffers;
}

ffi::Error check_count(size_t totals) {
  if (totals <= 1) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(kOperation) +
                                     ": must be called with dy, x and at most one total, got " +
                                     std::to_string(2 + totals) + " arguments");
}

ffi::Error check_shapes(const WeightGradientBuffers& buffers, Addresses addresses) {
  Checks checks(kOperation, addresses);
  checks.rank("dy", buffers.dy, 2).dtype("dy", buffers.dy, {ffi::BF16, ffi::F16}).rank("x", buffers.x, 2);
  if (!checks.passed()) return checks.error();
  const int64_t k = buffers.dy.dimensions()[0], m = buffers.dy.dimensions()[1], n = buffers.x.dimensions()[1];
  checks.require(k > 0 && m % 8 == 0, "dy", buffers.dy, "have at least one row, and a last dim that is a multiple of 8")
      .dtype("x", buffers.x, {buffers.dy.element_type()})
      .shape("x", buffers.x, {k, n})
      .require(n % 8 == 0, "x", buffers.x, "have a last dim that is a multiple of 8")
      .dtype("the result d", buffers.d, {ffi::F32})
      .shape("the result d", buffers.d, {m, n})
      .dtype("the result workspace", buffers.workspace, {ffi::U8})
      .shape("the result workspace", buffers.workspace, {kWorkspaceBytes});
  if (buffers.total) checks.dtype("total", *buffers.total, {ffi::F32}).shape("total", *buffers.total, {m, n});
  return checks.error();
}

ffi::Error check_addresses(const WeightGradientBuffers& buffers) {
  Checks checks(kOperation);
  checks.aligned("dy", buffers.dy, kMinAlignment)
      .aligned("x", buffers.x, kMinAlignment)
      .aligned("the result d", buffers.d, kMinAlignment)
      .aligned("the result workspace", buffers.workspace, kFullAlignment);
  if (buffers.total) checks.aligned("total", *buffers.total, kMinAlignment);
  return checks.error();
}

GemmProblem problem_of(const WeightGradientBuffers& buffers) {
  const cudaDataType_t type = buffers.dy.element_type() == ffi::BF16 ? CUDA_R_16BF : CUDA_R_16F;
  return {
      .m = buffers.dy.dimensions()[1],
      .n = buffers.x.dimensions()[1],
      .k = buffers.dy.dimensions()[0],
      .a_type = type,
      .b_type = type,
      .d_type = CUDA_R_32F,
      .bias_type = CUDA_R_32F,
      .has_bias = false,
      .has_c = buffers.total.has_value(),
      .fast_accumulation = false,
      .alpha = 1.0f,
      .candidate = 0,
      .contracting_first = true,
  };
}

GemmOperands operands_of(const WeightGradientBuffers& buffers) {
  return {
      .a = buffers.dy.untyped_data(),
      .b = buffers.x.untyped_data(),
      .a_scale = nullptr,
      .b_scale = nullptr,
      .bias = nullptr,
      .c = buffers.total ? buffers.total->untyped_data() : nullptr,
      .d = buffers.d.untyped_data(),
      .workspace = buffers.workspace.untyped_data(),
  };
}

ffi::Error error_of(const Failure& failure) {
  return failure ? ffi::Error::Internal(std::string(kOperation) + ": " + failure.reason) : ffi::Error::Success();
}

ffi::ErrorOr<std::unique_ptr<WeightGradientState>> instantiate() {
  return ffi::ErrorOr<std::unique_ptr<WeightGradientState>>(std::make_unique<WeightGradientState>());
}

// XLA may pass other addresses here than to execute, so this stage does not check them.
ffi::Error initialize(WeightGradientState* state, ffi::AnyBuffer dy, ffi::AnyBuffer x, ffi::RemainingArgs total,
                      ffi::Result<ffi::AnyBuffer> d, ffi::Result<ffi::AnyBuffer> workspace) {
  if (state->plans.prepared()) return ffi::Error::Success();
  if (ffi::Error error = check_count(total.size()); error.failure()) return error;
  const WeightGradientBuffers buffers = gather(dy, x, total, *d, *workspace);
  if (ffi::Error error = check_shapes(buffers, Addresses::kUnknown); error.failure()) return error;
  if (is_empty(*d)) return ffi::Error::Success();
  return error_of(state->plans.prepare(problem_of(buffers), operands_of(buffers)));
}

ffi::Error execute(cudaStream_t stream, WeightGradientState* state, ffi::AnyBuffer dy, ffi::AnyBuffer x,
                   ffi::RemainingArgs total, ffi::Result<ffi::AnyBuffer> d, ffi::Result<ffi::AnyBuffer> workspace) {
  if (ffi::Error error = check_count(total.size()); error.failure()) return error;
  const WeightGradientBuffers buffers = gather(dy, x, total, *d, *workspace);
  if (ffi::Error error = check_shapes(buffers, Addresses::kKnown); error.failure()) return error;
  if (is_empty(*d)) return ffi::Error::Success();
  if (ffi::Error error = check_addresses(buffers); error.failure()) return error;
  return error_of(state->plans.enqueue(problem_of(buffers), operands_of(buffers), stream));
}

XLA_FFI_DEFINE_HANDLER(instantiate_handler, instantiate, ffi::Ffi::BindInstantiate(),
                       {ffi::Traits::kCmdBufferCompatible});

// XLA passes the same buffers to initialize and to execute.
template <typename Binding>
auto bind_buffers(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()   // dy
      .template Arg<ffi::AnyBuffer>()   // x
      .RemainingArgs()                  // total
      .template Ret<ffi::AnyBuffer>()   // d
      .template Ret<ffi::AnyBuffer>();  // workspace
}

XLA_FFI_DEFINE_HANDLER(initialize_handler, initialize,
                       bind_buffers(ffi::Ffi::BindInitialize().Ctx<ffi::State<WeightGradientState>>()),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(
    execute_handler, execute,
    bind_buffers(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::State<WeightGradientState>>()),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const weight_gradient_instantiate_handler = instantiate_handler;
XLA_FFI_Handler* const weight_gradient_initialize_handler = initialize_handler;
XLA_FFI_Handler* const weight_gradient_execute_handler = execute_handler;

XLA_FFI_TypeId* weight_gradient_state_type_id() { return &WeightGradientState::id; }

const XLA_FFI_TypeInfo* weight_gradient_state_type_info() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<WeightGradientState>();
  return &info;
}

}  // namespace jax_fp8
