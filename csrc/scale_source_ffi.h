// `ScaleSource` as XLA passes it: its rule as attributes and its array as an operand, with the checks of both.
#pragma once

#include "ffi.h"
#include "scale_source.h"

// XLA decodes either all attributes of a call into one struct, or each attribute by itself. So an operation with
// further attributes has a struct of its own with the rule as last member, and lists the rule's members after its own.
// The names are the same in every operation.
#define JAX_FP8_SCALE_RULE_MEMBERS                                                          \
  xla::ffi::StructMember<int32_t>("row"), xla::ffi::StructMember<bool>("from_amax"),        \
      xla::ffi::StructMember<int32_t>("margin"), xla::ffi::StructMember<float>("amax_epsilon"), \
      xla::ffi::StructMember<bool>("power_2_scale")

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp8::ScaleRule, JAX_FP8_SCALE_RULE_MEMBERS);

namespace jax_fp8 {

inline Checks& check_source(Checks& checks, const ffi::AnyBuffer& source, const ScaleRule& rule) {
  return checks.dtype("source", source, {ffi::F32})
      .require(source.dimensions().size() <= 1, "source", source, "have rank 0 or 1")
      .require(rule.row >= 0 && rule.row < count_of(source), "source", source,
               "have an element " + std::to_string(rule.row))
      .margin(rule.margin)
      .not_negative("amax_epsilon", rule.amax_epsilon);
}

}  // namespace jax_fp8
