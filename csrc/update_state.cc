#include "update_state.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "ffi.h"

namespace jax_fp8 {
namespace {

constexpr char kOperation[] = "jax_fp8_update_state";

std::optional<Fp8Type> fp8_type_of(std::string_view name) {
  for (ffi::DataType dtype : {ffi::F8E4M3FN, ffi::F8E5M2}) {
    if (name == name_of(dtype)) return fp8_type(dtype);
  }
  return std::nullopt;
}

ffi::Error wrong_format(const char* which, std::string_view name) {
  return ffi::Error::InvalidArgument(std::string(kOperation) + ": " + which +
                                     " must be float8_e4m3fn or float8_e5m2, got " + std::string(name));
}

// Walks the operands and results in order, a scale and a history for each leaf, and reports the first broken rule.
class LeafReader {
 public:
  LeafReader(ffi::RemainingArgs operands, ffi::RemainingRets results) : operands_(operands), results_(results) {}

  // Reads the next leaf from its two operands.
  StateLeaf read() {
    const auto scale = operands_.get<ffi::AnyBuffer>(next_), history = operands_.get<ffi::AnyBuffer>(next_ + 1);
    auto new_scale = results_.get<ffi::AnyBuffer>(next_), new_history = results_.get<ffi::AnyBuffer>(next_ + 1);
    const std::string of_leaf = " of leaf " + std::to_string(next_ / 2);
    const auto name = [&](const char* array) { return array + of_leaf; };
    next_ += 2;
    if (!checks_.passed() || !scale.has_value() || !history.has_value() || !new_scale.has_value() ||
        !new_history.has_value()) {
      return {};  // only the checks can have failed here, since the handler has counted the arrays
    }
    const std::vector<int64_t> shape = shape_of(*scale), history_shape = shape_of(*history);
    const bool has_rows = !shape.empty() && shape.back() == kGemmRows;
    const bool fits = history_shape.size() == shape.size() + 1 && history_shape.back() >= 1 &&
                      std::equal(shape.begin(), shape.end(), history_shape.begin());
    checks_.dtype(name("scale").c_str(), *scale, {ffi::F32})
        .require(has_rows, name("scale").c_str(), *scale, "end in a dim of " + std::to_string(kGemmRows))
        .dtype(name("history").c_str(), *history, {ffi::F32})
        .require(fits, name("history").c_str(), *history,
                 "have the shape of its scale, " + name_of(shape) + ", and one more dim, of at least 1");
    check_in_place(name("scale"), *scale, **new_scale);
    check_in_place(name("history"), *history, **new_history);
    if (!checks_.passed()) return {};
    return {
        .scale = scale->typed_data<float>(),
        .history = history->typed_data<float>(),
        .rows = count_of(*scale),
        .length = history_shape.back(),
    };
  }

  bool passed() const { return checks_.passed(); }
  ffi::Error error() const { return checks_.error(); }

 private:
  void check_in_place(const std::string& name, ffi::AnyBuffer before, ffi::AnyBuffer after) {
    const bool same = after.untyped_data() == before.untyped_data() && after.element_type() == before.element_type() &&
                      shape_of(after) == shape_of(before);
    checks_.require(same, name.c_str(), before, "be updated in place; alias its result with it");
  }

  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  Checks checks_{kOperation};
  size_t next_ = 0;
};

ffi::Error update_state(cudaStream_t stream, ffi::AnyBuffer recorded, ffi::RemainingArgs operands,
                        ffi::Result<ffi::AnyBuffer> counts, ffi::RemainingRets results, std::string_view forward,
                        std::string_view backward, int32_t margin, bool most_recent, bool forget_outliers) {
  if (operands.size() % 2 != 0 || results.size() != operands.size()) {
    return ffi::Error::InvalidArgument(
        std::string(kOperation) +
        ": the call must have a scale and a history for each leaf, and results for them, got " +
        std::to_string(operands.size()) + " operands and " + std::to_string(results.size()) + " results");
  }
  const auto forward_type = fp8_type_of(forward), backward_type = fp8_type_of(backward);
  if (!forward_type) return wrong_format("forward", forward);
  if (!backward_type) return wrong_format("backward", backward);

  LeafReader reader(operands, results);
  std::vector<StateLeaf> leaves(operands.size() / 2);
  int64_t rows = 0;
  for (StateLeaf& leaf : leaves) {
    leaf = reader.read();
    rows = sum_of(rows, leaf.rows);
  }
  if (!reader.passed()) return reader.error();
  Checks checks(kOperation);
  checks.margin(margin).dtype("recorded", recorded, {ffi::F32})
      .shape("recorded", recorded, {rows})
      .require(rows <= kMostInt32, "recorded", recorded, "have fewer than 2**31 rows")
      .dtype("the result counts", *counts, {ffi::S32})
      .shape("the result counts", *counts, {sizeof(StateCounts) / sizeof(uint32_t)});
  if (!checks.passed()) return checks.error();
  const UpdateStateArguments arguments{
      .leaves = leaves.data(),
      .leaf_count = static_cast<int>(leaves.size()),
      .recorded = recorded.typed_data<float>(),
      .counts = static_cast<StateCounts*>(counts->untyped_data()),
      .rule = {*forward_type, *backward_type, std::ldexp(1.0f, margin), most_recent, forget_outliers},
  };
  return launch_result(kOperation, launch_update_state(arguments, stream));
}

XLA_FFI_DEFINE_HANDLER(handler, update_state,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // recorded
                           .RemainingArgs()        // for each leaf: scale, history
                           .Ret<ffi::AnyBuffer>()  // counts
                           .RemainingRets()        // for each leaf: scale, history
                           .Attr<std::string_view>("forward")
                           .Attr<std::string_view>("backward")
                           .Attr<int32_t>("margin")
                           .Attr<bool>("most_recent")
                           .Attr<bool>("forget_outliers"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const update_state_handler = handler;

}  // namespace jax_fp8
