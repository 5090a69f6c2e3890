// The attention of one new token of each row to a cache of keys and values, of which it first writes its own slot.
//
//     logits = scale Σ query key    weights = softmax(logits of the slots that are seen)    attended = Σ weights value
//
// Slots before `prompt_slots` have the prompt, as many of them as the row's length. Slot prompt_slots + i has the new
// token i. The new token sees its row's prompt, and new tokens up to itself.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtypes.h"
#include "sizes.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

constexpr int64_t kFewestHeadDim = 16, kMostHeadDim = 256, kHeadDimStep = 8;
constexpr int64_t kMostQueries = 16;  // that share a key head

struct CachedAttentionSizes {
  int64_t batch, kv_heads;
  int64_t queries;       // of a key head, from 1 to 16
  int64_t head_dim;      // a multiple of 8 from 16 to 256
  int64_t slots;         // slots * head_dim fits an int32
  int64_t prompt_slots;  // less than slots
  int64_t pairs;         // of features that are rotated, at most half of head_dim
};

struct CachedAttentionArguments {
  const void* query;                 // [batch, kv_heads, queries, head_dim]
  const void *key, *value;           // [batch, kv_heads, head_dim] of the new token
  SourceType type;                   // of these, and of the result
  bool is_fp8;                       // whether the cache is in E4M3; else it is of `type` too
  void *keys, *values;               // [batch, kv_heads, slots, head_dim], written in place
  float *key_scales, *value_scales;  // [batch, kv_heads, slots], null without FP8
  const int32_t* lengths;            // [batch], taken as from 0 to prompt_slots
  const int32_t* step;               // [], the number of the new token, taken as from 0 to slots - prompt_slots - 1
  const float *cos, *sin;            // [batch, pairs]
  void* attended;               // like query; with attended_scale cast by it to E4M3
  const float* attended_scale;  // [], or null; only of bfloat16
  CachedAttentionSizes sizes;
  int32_t window;   // how many positions are seen; 0: all
  float scale;      // of the products of queries and keys
  float logit_cap;  // 0: none
};

// Queries, keys and values lie at multiples of 16 bytes.
cudaError_t launch_cached_attention(const CachedAttentionArguments& arguments, cudaStream_t stream);

extern XLA_FFI_Handler* const cached_attention_handler;

}  // namespace jax_fp8
