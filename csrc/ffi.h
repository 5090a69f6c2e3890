// What every handler needs: XLA's FFI, and checks that report a bad call in one sentence.
//
// A handler reads like its contract:
//
//     Checks checks("jax_fp8_quantize");
//     checks.rank("x", x, 2).dtype("x", x, kSourceTypes);
//     if (!checks.passed()) return checks.error();
//
// `Checks` reports the first broken rule: the operation, the argument, what it must be, and what arrived.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "dtypes.h"
#include "launch.h"
#include "sizes.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8 {

namespace ffi = xla::ffi;

inline std::string name_of(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F64: return "float64";
    case ffi::F32: return "float32";
    case ffi::BF16: return "bfloat16";
    case ffi::F16: return "float16";
    case ffi::F8E4M3FN: return "float8_e4m3fn";
    case ffi::F8E5M2: return "float8_e5m2";
    case ffi::U8: return "uint8";
    case ffi::U16: return "uint16";
    case ffi::U32: return "uint32";
    case ffi::S8: return "int8";
    case ffi::S32: return "int32";
    default: return "XLA dtype " + std::to_string(static_cast<int>(dtype));
  }
}

inline std::string name_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t dim = 0; dim < shape.size(); ++dim) text += (dim ? ", " : "") + std::to_string(shape[dim]);
  return text + "]";
}

// The number of elements, with a dim of zero counted as one: even the dims of an empty buffer must be small enough for
// kernels to count with.
inline int64_t extent_of(const ffi::AnyBuffer& buffer) {
  int64_t extent = 1;
  for (int64_t dim : buffer.dimensions()) extent = dim < 0 ? kMostInt64 : product_of(extent, dim == 0 ? 1 : dim);
  return extent;
}

inline bool is_empty(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return std::find(dims.begin(), dims.end(), 0) != dims.end();
}

inline int64_t count_of(const ffi::AnyBuffer& buffer) { return is_empty(buffer) ? 0 : extent_of(buffer); }

inline std::vector<int64_t> shape_of(const ffi::AnyBuffer& buffer) {
  return {buffer.dimensions().begin(), buffer.dimensions().end()};
}

inline std::optional<SourceType> source_type(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F32: return SourceType::kFloat32;
    case ffi::BF16: return SourceType::kBFloat16;
    case ffi::F16: return SourceType::kFloat16;
    default: return std::nullopt;
  }
}

inline std::optional<Fp8Type> fp8_type(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F8E4M3FN: return Fp8Type::kE4M3;
    case ffi::F8E5M2: return Fp8Type::kE5M2;
    default: return std::nullopt;
  }
}

// Before the first launch XLA may pass buffers without addresses.
enum class Addresses { kKnown, kUnknown };

class Checks {
 public:
  explicit Checks(const char* operation, Addresses addresses = Addresses::kKnown)
      : operation_(operation), addresses_(addresses) {}

  // The general check; the others call it. `rule` completes "<operation>: <argument> must ...".
  Checks& require(bool holds, const char* argument, const ffi::AnyBuffer& buffer, const std::string& rule) {
    if (!holds && message_.empty()) {
      message_ = operation_ + ": " + argument + " must " + rule + ", got " + name_of(buffer.element_type()) +
                 name_of(shape_of(buffer));
    }
    return *this;
  }

  // The same for an attribute. `value` is what arrived.
  template <typename Value>
  Checks& attribute(bool holds, const char* name, Value value, const std::string& rule) {
    if (!holds && message_.empty()) {
      message_ = operation_ + ": " + name + " must " + rule + ", got " + std::to_string(value);
    }
    return *this;
  }

  // The bounds keep both 2**margin and 2**-margin normal float32 numbers.
  Checks& margin(int32_t margin) {
    constexpr int32_t kMost = 126;
    return attribute(margin >= -kMost && margin <= kMost, "margin", margin, "be from -126 to 126");
  }

  Checks& not_negative(const char* name, float value) {
    return attribute(std::isfinite(value) && value >= 0.0f, name, value, "be a finite number that is not negative");
  }

  Checks& finite(const char* name, float value) {
    return attribute(std::isfinite(value), name, value, "be a finite number");
  }

  // Checked for every buffer, before the handler computes with its dims.
  Checks& sound(const char* argument, const ffi::AnyBuffer& buffer) {
    if (extent_of(buffer) > kMostElements) {
      return require(false, argument, buffer, "have no negative dim, and at most 2**42 elements");
    }
    const bool placed = addresses_ == Addresses::kUnknown || is_empty(buffer) || buffer.untyped_data() != nullptr;
    if (!placed) return require(false, argument, buffer, "have an address");
    const size_t bytes = ffi::ByteWidth(buffer.element_type());
    return is_aligned(buffer.untyped_data(), std::max<size_t>(bytes, 1)) ? *this : aligned(argument, buffer, bytes);
  }

  Checks& dtype(const char* argument, const ffi::AnyBuffer& buffer, std::initializer_list<ffi::DataType> allowed) {
    sound(argument, buffer);
    bool found = false;
    std::string names;
    for (ffi::DataType candidate : allowed) {
      found |= candidate == buffer.element_type();
      names += (names.empty() ? "" : " or ") + name_of(candidate);
    }
    return require(found, argument, buffer, "be " + names);
  }

  Checks& rank(const char* argument, const ffi::AnyBuffer& buffer, size_t rank) {
    return require(buffer.dimensions().size() == rank, argument, buffer, "have rank " + std::to_string(rank));
  }

  // Rank 2, with dims that fit an int: kernels index their tiles by rows and columns as int.
  Checks& matrix(const char* argument, const ffi::AnyBuffer& buffer) {
    rank(argument, buffer, 2);
    const auto dims = buffer.dimensions();
    if (dims.size() != 2 || (dims[0] <= kMostIndexed && dims[1] <= kMostIndexed)) return *this;
    return require(false, argument, buffer, "have at most " + std::to_string(kMostIndexed) + " rows and columns");
  }

  Checks& shape(const char* argument, const ffi::AnyBuffer& buffer, const std::vector<int64_t>& shape) {
    return require(shape_of(buffer) == shape, argument, buffer, "have shape " + name_of(shape));
  }

  Checks& float32_scalar(const char* argument, const ffi::AnyBuffer& buffer) {
    return dtype(argument, buffer, {ffi::F32}).shape(argument, buffer, {});
  }

  Checks& aligned(const char* argument, const ffi::AnyBuffer& buffer, uintptr_t bytes) {
    return require(is_aligned(buffer.untyped_data(), bytes), argument, buffer,
                   "start at an address divisible by " + std::to_string(bytes));
  }

  bool passed() const { return message_.empty(); }
  // Success if all rules hold.
  ffi::Error error() const { return passed() ? ffi::Error::Success() : ffi::Error::InvalidArgument(message_); }

 private:
  std::string operation_;
  Addresses addresses_;
  std::string message_;
};

// The handler's result after a launch. `status` is that of `cudaGetLastError` right after the launch.
inline ffi::Error launch_result(const char* operation, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(operation) + ": the kernel could not be launched, CUDA says \"" +
                              cudaGetErrorString(status) + "\"");
}

// The binding of a handler whose parameter types tell XLA everything, in order: the stream, operands, results and one
// struct of attributes. XLA cannot infer a variable number of operands or the name of a single attribute from the
// parameters; such a handler writes its binding out.
struct BoundByParameters {
  template <typename Function>
  auto To(Function function, std::initializer_list<ffi::Traits> traits) const {
    return ffi::Ffi::BindTo(function, traits);
  }
};

}  // namespace jax_fp8

template <>
struct xla::ffi::CtxBinding<cudaStream_t> {
  using Ctx = PlatformStream<cudaStream_t>;
};
