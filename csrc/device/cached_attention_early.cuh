// What a block does before the kernels that make the new token have ended: it asks for the first of its keys and
// values, which are those of earlier tokens.
#pragma once

#include <cstdint>

#include "cached_attention_call.cuh"
#include "prefetch.cuh"

namespace jax_fp8::cached_attention {

constexpr int kMostAsked = 64 * 1024;  // bytes of keys, and of values, of the prompt, and of new tokens

// Four threads ask for keys of the prompt, keys of new tokens, and values likewise. The block's slots have numbers from
// `first` to `end`.
template <typename C, typename T>
__device__ inline void ask_for_slots(const Call<C, T>& call, const Part& part, const Seen& seen, int first, int end) {
  const int thread = static_cast<int>(threadIdx.x), row_bytes = call.sizes.head_dim * static_cast<int>(sizeof(C));
  const bool is_new = thread % 2 == 1;
  const int from = is_new ? max(first, seen.prompt) : first, to = is_new ? end : min(end, seen.prompt);
  if (thread >= 4 || from >= to || row_bytes % 16 != 0) return;
  const int64_t slot = int64_t{part.head} * call.sizes.slots + seen.first + seen.from_first(from);
  const int rows = min(to - from, kMostAsked / row_bytes);
  ask_for((thread < 2 ? call.keys : call.values) + slot * call.sizes.head_dim, int64_t{rows} * row_bytes);
}

}  // namespace jax_fp8::cached_attention
