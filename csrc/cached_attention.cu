// The launch: how many blocks share the slots of a head. The kernel is in device/cached_attention.cuh.
#include "cached_attention.h"

#include <algorithm>
#include <type_traits>

#include "device/by_dtype.cuh"
#include "device/cached_attention.cuh"
#include "kernel_launch.h"
#include "launch.h"

namespace jax_fp8 {
namespace {

using namespace cached_attention;

// Two blocks on a multiprocessor read faster than one, but not all larger clusters of such find room at once: on an
// H100, 64 clusters of 4 take up to a third longer than 64 of 2.
constexpr int kBlocksOnMultiprocessor = 1;
constexpr int kPairBlocksOnMultiprocessor = 2;  // of clusters of 2
// Of a block; with fewer it would mostly wait for the others. In a cluster of 16 it waits longer.
constexpr int kFewestSlots = 64;

cudaError_t find_multiprocessors(int& multiprocessors) {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  return cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
}

// How many blocks share the slots of a head, if there are `heads` of them, as a logarithm. The registers of a
// multiprocessor hold `resident` blocks.
int log2_blocks_of(int64_t heads, int64_t slots, int multiprocessors, int resident) {
  const auto is_worth = [&](int log2) {
    const int pairs = std::max(std::min(kPairBlocksOnMultiprocessor, resident), kBlocksOnMultiprocessor);
    const int64_t most = int64_t{multiprocessors} * (log2 == 1 ? pairs : kBlocksOnMultiprocessor);
    const int64_t fewest = log2 == kMostLog2Blocks ? 4 * kFewestSlots : kFewestSlots;
    return heads << log2 <= most && fewest << log2 <= slots;
  };
  int log2_blocks = 0;
  while (log2_blocks < kMostLog2Blocks && is_worth(log2_blocks + 1)) ++log2_blocks;
  return log2_blocks;
}

template <typename C, typename T, int kWidth, int kHeads, int kWarps>
cudaError_t launch_kernel(Call<C, T> call, int64_t heads, int multiprocessors, cudaStream_t stream) {
  const auto kernel = attend_kernel<C, T, kWidth, kHeads, kWarps>;
  constexpr size_t kQueryBytes = sizeof(float) * kWarps * kPartWidth<kWidth>;  // of shared memory
  constexpr int kAtOnce = kResident<C, kWidth, kWarps>;
  Clusters clusters{
      .blocks = 0,
      .blocks_per_cluster = 0,
      .threads = kWarps * kWarp,
      .shared_bytes = kQueryBytes * std::min(call.sizes.queries, kHeads),
  };
  call.tiles = static_cast<int>(divide_up(call.sizes.queries, kHeads));
  heads *= call.tiles;
  bool found = false;
  cudaError_t status = allow_shared_bytes(kernel, static_cast<int>(kQueryBytes * kHeads));
  if (status == cudaSuccess) status = find_clusters(kernel, found);
  call.log2_blocks = log2_blocks_of(heads, found ? call.sizes.slots : 0, multiprocessors, kAtOnce);
  // Clusters that do not all find room at once are halved: the last ones would run almost alone.
  int room = 0;
  for (; status == cudaSuccess && call.log2_blocks > 0 && room < heads; call.log2_blocks -= room < heads) {
    clusters.blocks_per_cluster = 1u << call.log2_blocks;
    clusters.blocks = heads << call.log2_blocks;
    status = ClusterLaunch(clusters, stream).find_room(kernel, room);
  }
  if (status != cudaSuccess) return status;
  clusters.blocks_per_cluster = call.log2_blocks == 0 ? 0 : 1u << call.log2_blocks;
  clusters.blocks = heads << call.log2_blocks;
  // Blocks that begin when others have ended find no kernel before still running, and would ask for all twice. Many
  // heads use all that memory brings anyway.
  const bool begin_at_once = kWarps != kWarpsOfManyHeads && clusters.blocks <= int64_t{multiprocessors} * kAtOnce;
  call.asks_early = call.asks_early && found && begin_at_once;
  return ClusterLaunch(clusters, stream, found ? Begins::kEarly : Begins::kInTurn)(kernel, call);
}

template <typename C, typename T, int kWidth>
cudaError_t launch(const Call<C, T>& call, int64_t heads, cudaStream_t stream) {
  constexpr bool kIsFloat = std::is_same_v<C, float>;
  constexpr int kHeads = kIsFloat ? kMostQueriesOfFloats : kMostQueriesOfProducts, kWarps = kFewWarps<kWidth>;
  int multiprocessors = 0;
  const cudaError_t status = find_multiprocessors(multiprocessors);
  if (status != cudaSuccess) return status;
  if constexpr (kIsFloat) {
    if (call.sizes.queries == 1) return launch_kernel<C, T, kWidth, 1, kWarps>(call, heads, multiprocessors, stream);
  }
  const int64_t tiles = heads * divide_up(call.sizes.queries, kHeads);
  if constexpr (kIsFp8<C> && kWidth <= 128) {
    if (tiles > int64_t{multiprocessors} * kResident<C, kWidth, kWarps>) {
      return launch_kernel<C, T, kWidth, kHeads, kWarpsOfManyHeads>(call, heads, multiprocessors, stream);
    }
  }
  if constexpr (!kIsFloat && kMostWarps<kWidth> > kWarps) {
    const int log2_blocks = log2_blocks_of(tiles, call.sizes.slots, multiprocessors, kResident<C, kWidth, kWarps>);
    const int at_once = kWarps * kTileSlots<C, kWidth, kWarps>;
    if (tiles << log2_blocks <= multiprocessors && call.sizes.slots >> log2_blocks > at_once) {
      return launch_kernel<C, T, kWidth, kHeads, kMostWarps<kWidth>>(call, heads, multiprocessors, stream);
    }
  }
  return launch_kernel<C, T, kWidth, kHeads, kWarps>(call, heads, multiprocessors, stream);
}

template <typename C, typename T>
cudaError_t launch_of(const CachedAttentionArguments& arguments, cudaStream_t stream) {
  const auto& sizes = arguments.sizes;
  const bool capped = arguments.logit_cap != 0.0f;
  const Call<C, T> call{
      .query = static_cast<const T*>(arguments.query),
      .key = static_cast<const T*>(arguments.key),
      .value = static_cast<const T*>(arguments.value),
      .cos = arguments.cos,
      .sin = arguments.sin,
      .pairs = static_cast<int>(sizes.pairs),
      .keys = static_cast<C*>(arguments.keys),
      .values = static_cast<C*>(arguments.values),
      .key_scales = arguments.key_scales,
      .value_scales = arguments.value_scales,
      .lengths = arguments.lengths,
      .step = arguments.step,
      .attended = static_cast<T*>(arguments.attended),
      .attended_scale = arguments.attended_scale,
      .sizes = {static_cast<int>(sizes.kv_heads), static_cast<int>(sizes.queries), static_cast<int>(sizes.head_dim),
                static_cast<int>(sizes.slots), static_cast<int>(sizes.prompt_slots), arguments.window},
      .logits = {capped ? arguments.scale / arguments.logit_cap : arguments.scale * kLog2E,
                 capped ? arguments.logit_cap * kLog2E : 0.0f},
      .tiles = 1,
      .log2_blocks = 0,
      .asks_early = Following::current(),
  };
  const int64_t heads = sizes.batch * sizes.kv_heads;
  if (sizes.head_dim <= 64) return launch<C, T, 64>(call, heads, stream);
  if (sizes.head_dim <= 128) return launch<C, T, 128>(call, heads, stream);
  return launch<C, T, 256>(call, heads, stream);
}

}  // namespace

cudaError_t launch_cached_attention(const CachedAttentionArguments& arguments, cudaStream_t stream) {
  if (arguments.sizes.batch == 0 || arguments.sizes.kv_heads == 0) return cudaSuccess;
  cudaError_t status = cudaSuccess;
  by_dtype(arguments.type, [&](auto element) {
    using Element = decltype(element);
    status = arguments.is_fp8 ? launch_of<E4M3, Element>(arguments, stream)
                              : launch_of<Element, Element>(arguments, stream);
  });
  return status;
}

}  // namespace jax_fp8
