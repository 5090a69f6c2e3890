// The handler of a chain calls the handlers of other targets, its links, as XLA would: each with operands and results
// that are parts of the chain's own, and with attributes of its own.
//
// Attributes: `targets` has the names of the links, between spaces. link_0000, link_0001, ... have the attributes of
// each. `arrays` has for each link the numbers of its operands and of its results, and for each of those
//
//     the number of the chain's operand, or -1, -2, ... of its result; the first byte in it; dtype; rank; dims
#include "chain.h"

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "activation.h"
#include "amax.h"
#include "cached_attention.h"
#include "few_rows_gemm.h"
#include "ffi.h"
#include "kernel_launch.h"
#include "norm.h"
#include "quantize.h"

namespace jax_fp8 {
namespace {

constexpr char kOperation[] = "jax_fp8_chain";

// Targets without a state, as jax_fp8/kernels/chain.py has them.
XLA_FFI_Handler* handler_of(std::string_view target) {
  if (target == "jax_fp8_activation_amax") return activation_amax_handler;
  if (target == "jax_fp8_activation_quantize") return activation_quantize_handler;
  if (target == "jax_fp8_amax") return amax_handler;
  if (target == "jax_fp8_cached_attention") return cached_attention_handler;
  if (target == "jax_fp8_few_rows_gemm") return few_rows_gemm_handler;
  if (target == "jax_fp8_norm_amax") return norm_amax_handler;
  if (target == "jax_fp8_norm_quantize") return norm_quantize_handler;
  return target == "jax_fp8_quantize" ? quantize_handler : nullptr;
}

struct Link {
  XLA_FFI_Handler* handler;
  const XLA_FFI_Attrs* attributes;
  std::vector<XLA_FFI_Buffer> operands, results;
};

ffi::Error refuse(const std::string& rule) {
  return ffi::Error::InvalidArgument(std::string(kOperation) + ": " + rule);
}

// The numbers of the attribute `arrays`, one after the other.
class Numbers {
 public:
  explicit Numbers(ffi::Span<const int64_t> numbers) : next_(numbers.begin()), end_(numbers.end()) {}

  bool has(int64_t count) const { return count >= 0 && count <= end_ - next_; }
  bool is_at_end() const { return next_ == end_; }
  int64_t take() { return *next_++; }
  const int64_t* take(int64_t count) {
    next_ += count;
    return next_ - count;
  }

 private:
  const int64_t *next_, *end_;
};

// 0 for a dtype that no link takes.
int64_t bytes_of(int64_t dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_F8E5M2:
    case XLA_FFI_DataType_F8E4M3FN: return 1;
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16: return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32: return 4;
    default: return 0;
  }
}

// The chain's own operands and results.
struct Whole {
  std::vector<ffi::AnyBuffer> operands, results;

  const ffi::AnyBuffer* find(int64_t number) const {
    const auto& list = number >= 0 ? operands : results;
    const auto index = static_cast<uint64_t>(number >= 0 ? number : -1 - number);
    return index < list.size() ? &list[index] : nullptr;
  }
};

// Reads one array of a link. Returns what it breaks, or an empty string.
std::string read_part(Numbers& numbers, const Whole& whole, XLA_FFI_Buffer& part) {
  constexpr int64_t kFixed = 4;
  if (!numbers.has(kFixed)) return "arrays must not end within an array";
  const ffi::AnyBuffer* const base = whole.find(numbers.take());
  const int64_t first = numbers.take(), dtype = numbers.take(), rank = numbers.take();
  if (base == nullptr) return "arrays must name operands and results that there are";
  if (!numbers.has(rank)) return "arrays must have the dims of each array";
  const int64_t* const dims = numbers.take(rank);
  int64_t bytes = bytes_of(dtype);
  if (bytes == 0) return "arrays must have a dtype that a link takes, got number " + std::to_string(dtype);
  for (int64_t dim = 0; dim < rank; ++dim) bytes = dims[dim] < 0 ? kMostInt64 : product_of(bytes, dims[dim]);
  const int64_t all = product_of(count_of(*base), static_cast<int64_t>(ffi::ByteWidth(base->element_type())));
  if (!lies_within(first, bytes, all)) {
    return "an array of a link must lie within that of the chain, got " + std::to_string(bytes) + " bytes from " +
           std::to_string(first) + " on in " + name_of(base->element_type()) + name_of(shape_of(*base));
  }
  auto* const data = static_cast<unsigned char*>(base->untyped_data());
  part = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(dtype),
          data == nullptr ? nullptr : data + first, rank, const_cast<int64_t*>(dims)};
  return "";
}

std::string read_parts(int64_t count, Numbers& numbers, const Whole& whole, std::vector<XLA_FFI_Buffer>& parts) {
  if (!numbers.has(count)) return "arrays must have as many arrays as it says";
  parts.resize(static_cast<size_t>(count));
  for (XLA_FFI_Buffer& part : parts) {
    if (std::string broken = read_part(numbers, whole, part); !broken.empty()) return broken;
  }
  return "";
}

const XLA_FFI_Attrs* attributes_of(const XLA_FFI_Attrs& all, size_t link) {
  char wanted[16];
  const int length = std::snprintf(wanted, sizeof(wanted), "link_%04zu", link);
  for (int64_t i = 0; i < all.size; ++i) {
    const std::string_view name(all.names[i]->ptr, all.names[i]->len);
    if (name == std::string_view(wanted, length) && all.types[i] == XLA_FFI_AttrType_DICTIONARY) {
      return static_cast<const XLA_FFI_Attrs*>(all.attrs[i]);
    }
  }
  return nullptr;
}

ffi::Error read_links(std::string_view targets, Numbers numbers, const Whole& whole, const XLA_FFI_Attrs& attributes,
                      std::vector<Link>& links) {
  while (!targets.empty()) {
    const std::string_view target = targets.substr(0, targets.find(' '));
    targets.remove_prefix(std::min(target.size() + 1, targets.size()));
    Link link{handler_of(target), attributes_of(attributes, links.size()), {}, {}};
    if (link.handler == nullptr) return refuse("targets must be kernels that can be links, got " + std::string(target));
    if (link.attributes == nullptr) {
      return refuse("each link must have attributes, got none for number " + std::to_string(links.size()));
    }
    if (!numbers.has(2)) return refuse("arrays must have the arrays of each link, got none for " + std::string(target));
    const int64_t operands = numbers.take(), results = numbers.take();
    std::string broken = read_parts(operands, numbers, whole, link.operands);
    if (broken.empty()) broken = read_parts(results, numbers, whole, link.results);
    if (!broken.empty()) return refuse(broken);
    links.push_back(std::move(link));
  }
  return numbers.is_at_end() ? ffi::Error::Success() : refuse("arrays must end with the last link");
}

// What `chain` reads and `read` finds in it, which XLA's binding decodes.
thread_local const XLA_FFI_CallFrame* current_frame = nullptr;
thread_local std::vector<Link>* current_links = nullptr;

ffi::Error read(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  const auto targets = attributes.get<std::string_view>("targets");
  const auto arrays = attributes.get<ffi::Span<const int64_t>>("arrays");
  if (!targets.has_value() || !arrays.has_value()) {
    return refuse("must have the attributes targets, a text, and arrays, of 64-bit integers");
  }
  Whole whole;
  Checks checks(kOperation);
  for (size_t i = 0; i < args.size(); ++i) {
    whole.operands.push_back(*args.get<ffi::AnyBuffer>(i));
    checks.sound("an operand", whole.operands.back());
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    whole.results.push_back(**rets.get<ffi::AnyBuffer>(i));
    checks.sound("a result", whole.results.back());
  }
  if (!checks.passed()) return checks.error();
  return read_links(*targets, Numbers(*arrays), whole, current_frame->attrs, *current_links);
}

XLA_FFI_DEFINE_HANDLER(reader, read, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* call(Link& link, const XLA_FFI_CallFrame& of_chain) {
  std::vector<XLA_FFI_ArgType> argument_types(link.operands.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(link.results.size(), XLA_FFI_RetType_BUFFER);
  std::vector<void*> arguments, results;
  for (XLA_FFI_Buffer& operand : link.operands) arguments.push_back(&operand);
  for (XLA_FFI_Buffer& result : link.results) results.push_back(&result);
  XLA_FFI_CallFrame frame = of_chain;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(arguments.size()), argument_types.data(),
                arguments.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results.size()), result_types.data(),
                results.data()};
  frame.attrs = *link.attributes;
  return link.handler(&frame);
}

XLA_FFI_Error* chain(XLA_FFI_CallFrame* frame) {
  std::vector<Link> links;  // stays empty where XLA only asks for the handler's traits
  current_frame = frame, current_links = &links;
  if (XLA_FFI_Error* error = reader(frame)) return error;
  for (Link& link : links) {
    const Following following(&link != links.data());
    if (XLA_FFI_Error* error = call(link, *frame)) return error;
  }
  return nullptr;
}

}  // namespace

XLA_FFI_Handler* const chain_handler = chain;

}  // namespace jax_fp8
