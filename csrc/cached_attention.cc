#include "cached_attention.h"

#include <string>

#include "ffi.h"

namespace jax_fp8 {

struct CachedAttentionAttributes {
  int32_t prompt_slots;
  float scale;
  int32_t window;   // 0: none
  float logit_cap;  // 0: none
  int32_t attended_row;
};

}  // namespace jax_fp8

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_fp8::CachedAttentionAttributes,
                                      xla::ffi::StructMember<int32_t>("prompt_slots"),
                                      xla::ffi::StructMember<float>("scale"),
                                      xla::ffi::StructMember<int32_t>("window"),
                                      xla::ffi::StructMember<float>("logit_cap"),
                                      xla::ffi::StructMember<int32_t>("attended_row"));

namespace jax_fp8 {
namespace {

constexpr char kOperation[] = "jax_fp8_cached_attention";
constexpr int64_t kMostHeads = int64_t{1} << 28;  // of all rows, so that the number of blocks fits an int
constexpr uintptr_t kAlignment = 16;

using Shape = std::vector<int64_t>;

// An optional operand that is missing has the shape [0, 0].
bool is_absent(const ffi::AnyBuffer& buffer) { return shape_of(buffer) == Shape{0, 0}; }

template <typename T>
T* pointer_to(const ffi::AnyBuffer& buffer) {
  return is_absent(buffer) ? nullptr : static_cast<T*>(buffer.untyped_data());
}

Checks& check_in_place(Checks& checks, const char* name, const ffi::AnyBuffer& before, const ffi::AnyBuffer& after) {
  const bool same = after.element_type() == before.element_type() && shape_of(after) == shape_of(before) &&
                    (is_empty(before) || after.untyped_data() == before.untyped_data());
  return checks.require(same, name, before, "be updated in place; alias its result with it");
}

struct Cache {
  ffi::AnyBuffer keys, values, key_scales, value_scales;
};

// The sizes of a call whose query and keys have the right ranks.
CachedAttentionSizes sizes_of(const ffi::AnyBuffer& query, const ffi::AnyBuffer& keys, const ffi::AnyBuffer& cos,
                              int32_t prompt_slots) {
  const auto dims = query.dimensions();
  return {
      .batch = dims[0],
      .kv_heads = dims[1],
      .queries = dims[2],
      .head_dim = dims[3],
      .slots = keys.dimensions()[2],
      .prompt_slots = prompt_slots,
      .pairs = is_absent(cos) ? 0 : cos.dimensions()[1],
  };
}

void check_cache(Checks& checks, const Cache& cache, const CachedAttentionSizes& sizes) {
  const bool is_fp8 = cache.keys.element_type() == ffi::F8E4M3FN;
  const Shape rows{sizes.batch, sizes.kv_heads, sizes.slots, sizes.head_dim};
  const Shape scales = is_fp8 ? Shape{sizes.batch, sizes.kv_heads, sizes.slots} : Shape{0, 0};
  checks.shape("keys", cache.keys, rows)
      .dtype("values", cache.values, {cache.keys.element_type()})
      .shape("values", cache.values, rows)
      .require(product_of(sizes.slots, sizes.head_dim) <= kMostIndexed, "keys", cache.keys,
               "have fewer than 2**31 elements of a head")
      .aligned("keys", cache.keys, kAlignment)
      .aligned("values", cache.values, kAlignment)
      .dtype("key_scales", cache.key_scales, {ffi::F32})
      .shape("key_scales", cache.key_scales, scales)
      .dtype("value_scales", cache.value_scales, {ffi::F32})
      .shape("value_scales", cache.value_scales, scales);
}

void check_sizes(Checks& checks, const ffi::AnyBuffer& query, const CachedAttentionSizes& sizes) {
  const int64_t head_dim = sizes.head_dim;
  checks
      .require(head_dim >= kFewestHeadDim && head_dim <= kMostHeadDim && head_dim % kHeadDimStep == 0, "query", query,
               "have a multiple of 8 from 16 to 256 as its last dim")
      .require(sizes.queries >= 1 && sizes.queries <= kMostQueries, "query", query,
               "have 1 to 16 queries for each key head")
      .require(product_of(sizes.batch, sizes.kv_heads) <= kMostHeads, "query", query,
               "have at most 2**28 key heads in all rows")
      .attribute(sizes.prompt_slots >= 0 && sizes.prompt_slots < sizes.slots, "prompt_slots",
                 static_cast<int32_t>(sizes.prompt_slots),
                 "be 0 or more and leave a slot behind them of " + std::to_string(sizes.slots));
}

void check_rotary(Checks& checks, const ffi::AnyBuffer& cos, const ffi::AnyBuffer& sin,
                  const CachedAttentionSizes& sizes) {
  checks.dtype("cos", cos, {ffi::F32})
      .require(is_absent(cos) || cos.dimensions()[0] == sizes.batch, "cos", cos,
               "have " + std::to_string(sizes.batch) + " rows")
      .require(sizes.pairs <= sizes.head_dim / 2, "cos", cos,
               "have at most half of " + std::to_string(sizes.head_dim) + " columns")
      .dtype("sin", sin, {ffi::F32})
      .shape("sin", sin, shape_of(cos));
}

// The scale by which the result is cast, which is one of several.
void check_attended_scale(Checks& checks, const ffi::AnyBuffer& scale, const ffi::AnyBuffer& query, int32_t row) {
  if (is_absent(scale)) return;
  const Shape shape = shape_of(scale);
  checks.dtype("attended_scale", scale, {ffi::F32})
      .require(shape.size() <= 1 && row >= 0 && row < (shape.empty() ? 1 : shape[0]), "attended_scale", scale,
               "be one scale, or several of which one is attended_row, here " + std::to_string(row))
      .dtype("query", query, {ffi::BF16});
}

ffi::Error cached_attention(cudaStream_t stream, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                            ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::AnyBuffer lengths, ffi::AnyBuffer step,
                            ffi::AnyBuffer cos, ffi::AnyBuffer sin, ffi::AnyBuffer key_scales,
                            ffi::AnyBuffer value_scales, ffi::AnyBuffer attended_scale,
                            ffi::Result<ffi::AnyBuffer> attended,
                            ffi::Result<ffi::AnyBuffer> new_keys, ffi::Result<ffi::AnyBuffer> new_values,
                            ffi::Result<ffi::AnyBuffer> new_key_scales, ffi::Result<ffi::AnyBuffer> new_value_scales,
                            CachedAttentionAttributes attributes) {
  Checks checks(kOperation);
  checks.rank("query", query, 4)
      .dtype("query", query, {ffi::F32, ffi::BF16, ffi::F16})
      .rank("keys", keys, 4)
      .dtype("keys", keys, {query.element_type(), ffi::F8E4M3FN})
      .rank("cos", cos, 2);
  if (!checks.passed()) return checks.error();
  const CachedAttentionSizes sizes = sizes_of(query, keys, cos, attributes.prompt_slots);
  const Cache cache{keys, values, key_scales, value_scales};
  const bool casts = !is_absent(attended_scale);
  check_sizes(checks, query, sizes);
  check_cache(checks, cache, sizes);
  check_rotary(checks, cos, sin, sizes);
  checks.dtype("key", key, {query.element_type()})
      .shape("key", key, {sizes.batch, sizes.kv_heads, sizes.head_dim})
      .dtype("value", value, {query.element_type()})
      .shape("value", value, {sizes.batch, sizes.kv_heads, sizes.head_dim})
      .aligned("query", query, kAlignment)
      .aligned("key", key, kAlignment)
      .aligned("value", value, kAlignment)
      .dtype("lengths", lengths, {ffi::S32})
      .shape("lengths", lengths, {sizes.batch})
      .dtype("step", step, {ffi::S32})
      .shape("step", step, {})
      .finite("scale", attributes.scale)
      .attribute(attributes.window >= 0, "window", attributes.window, "be 1 or more, or 0 for none")
      .not_negative("logit_cap", attributes.logit_cap)
      .dtype("the result attended", *attended, {casts ? ffi::F8E4M3FN : query.element_type()})
      .shape("the result attended", *attended, shape_of(query))
      .aligned("the result attended", *attended, kAlignment);
  check_attended_scale(checks, attended_scale, query, attributes.attended_row);
  check_in_place(checks, "keys", keys, *new_keys);
  check_in_place(checks, "values", values, *new_values);
  check_in_place(checks, "key_scales", key_scales, *new_key_scales);
  check_in_place(checks, "value_scales", value_scales, *new_value_scales);
  if (!checks.passed()) return checks.error();
  const CachedAttentionArguments arguments{
      .query = query.untyped_data(),
      .key = key.untyped_data(),
      .value = value.untyped_data(),
      .type = *source_type(query.element_type()),
      .is_fp8 = keys.element_type() == ffi::F8E4M3FN,
      .keys = keys.untyped_data(),
      .values = values.untyped_data(),
      .key_scales = pointer_to<float>(key_scales),
      .value_scales = pointer_to<float>(value_scales),
      .lengths = lengths.typed_data<int32_t>(),
      .step = step.typed_data<int32_t>(),
      .cos = pointer_to<float>(cos),
      .sin = pointer_to<float>(sin),
      .attended = attended->untyped_data(),
      .attended_scale = casts ? attended_scale.typed_data<float>() + attributes.attended_row : nullptr,
      .sizes = sizes,
      .window = attributes.window,
      .scale = attributes.scale,
      .logit_cap = attributes.logit_cap,
  };
  return launch_result(kOperation, launch_cached_attention(arguments, stream));
}

XLA_FFI_DEFINE_HANDLER(handler, cached_attention, BoundByParameters(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const cached_attention_handler = handler;

}  // namespace jax_fp8
