// The launch: how many blocks share the slots of a head. The kernel is in device/cached_attention.cuh.
#include "cached_attention.h"

#include <algorithm>

#include "device/by_dtype.cuh"
#include "device/cached_attention.cuh"
#include "kernel_launch.h"
#include "launch.h"

namespace jax_fp8 {
namespace {

using namespace cached_attention;

constexpr int kBlocksOnMultiprocessor = 2;
constexpr int kFewestSlots = 64;  // of a block; with fewer it would mostly wait for the others

// How many blocks share the slots of a head, if there are `heads` of them, as a logarithm.
cudaError_t find_blocks(int64_t heads, int64_t slots, int& log2_blocks) {
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  log2_blocks = 0;
  while (log2_blocks < kMostLog2Blocks && heads << (log2_blocks + 1) <= kBlocksOnMultiprocessor * multiprocessors &&
         kFewestSlots << (log2_blocks + 1) <= slots) {
    ++log2_blocks;
  }
  return status;
}

template <typename C, int kLanes, int kHeads>
cudaError_t launch(Call<C> call, int64_t heads, cudaStream_t stream) {
  constexpr int kWidth = kLanes * kVectorWidth;
  const auto kernel = attend_kernel<C, kLanes, kHeads>;
  Clusters clusters{
      .blocks = 0,
      .blocks_per_cluster = 0,
      .threads = kThreads<kHeads>,
      .shared_bytes = sizeof(float) * kWarps<kHeads> * kHeads * kWidth,
  };
  call.tiles = static_cast<int>(divide_up(call.sizes.queries, kHeads));
  heads *= call.tiles;
  bool found = false;
  cudaError_t status = allow_shared_bytes(kernel, static_cast<int>(clusters.shared_bytes));
  if (status == cudaSuccess) status = find_clusters(kernel, found);
  if (status == cudaSuccess) status = find_blocks(heads, found ? call.sizes.slots : 0, call.log2_blocks);
  // A cluster that finds no room is halved.
  for (int room = 0; status == cudaSuccess && call.log2_blocks > 0 && room == 0; call.log2_blocks -= room == 0) {
    clusters.blocks_per_cluster = 1u << call.log2_blocks;
    clusters.blocks = heads << call.log2_blocks;
    status = ClusterLaunch(clusters, stream).find_room(kernel, room);
  }
  if (status != cudaSuccess) return status;
  clusters.blocks_per_cluster = call.log2_blocks == 0 ? 0 : 1u << call.log2_blocks;
  clusters.blocks = heads << call.log2_blocks;
  return ClusterLaunch(clusters, stream)(kernel, call);
}

template <int kLanes, typename C>
cudaError_t launch_by_queries(const Call<C>& call, int64_t heads, cudaStream_t stream) {
  if (call.sizes.queries == 1) return launch<C, kLanes, 1>(call, heads, stream);
  if (call.sizes.queries <= 4) return launch<C, kLanes, 4>(call, heads, stream);
  return launch<C, kLanes, 8>(call, heads, stream);
}

template <typename C>
cudaError_t launch_of(const CachedAttentionArguments& arguments, cudaStream_t stream) {
  const auto& sizes = arguments.sizes;
  const bool capped = arguments.logit_cap != 0.0f;
  const Call<C> call{
      .query = arguments.query,
      .key = arguments.key,
      .value = arguments.value,
      .type = arguments.type,
      .cos = arguments.cos,
      .sin = arguments.sin,
      .pairs = static_cast<int>(sizes.pairs),
      .keys = static_cast<C*>(arguments.keys),
      .values = static_cast<C*>(arguments.values),
      .key_scales = arguments.key_scales,
      .value_scales = arguments.value_scales,
      .lengths = arguments.lengths,
      .step = arguments.step,
      .attended = arguments.attended,
      .sizes = {static_cast<int>(sizes.kv_heads), static_cast<int>(sizes.queries), static_cast<int>(sizes.head_dim),
                static_cast<int>(sizes.slots), static_cast<int>(sizes.prompt_slots), arguments.window},
      .logits = {capped ? arguments.scale / arguments.logit_cap : arguments.scale * kLog2E,
                 capped ? arguments.logit_cap * kLog2E : 0.0f},
      .tiles = 1,
      .log2_blocks = 0,
  };
  const int64_t heads = sizes.batch * sizes.kv_heads;
  if (sizes.head_dim <= 64) return launch_by_queries<8>(call, heads, stream);
  if (sizes.head_dim <= 128) return launch_by_queries<16>(call, heads, stream);
  return launch_by_queries<32>(call, heads, stream);
}

}  // namespace

cudaError_t launch_cached_attention(const CachedAttentionArguments& arguments, cudaStream_t stream) {
  if (arguments.sizes.batch == 0 || arguments.sizes.kv_heads == 0) return cudaSuccess;
  if (arguments.is_fp8) return launch_of<E4M3>(arguments, stream);
  cudaError_t status = cudaSuccess;
  by_dtype(arguments.type, [&](auto element) { status = launch_of<decltype(element)>(arguments, stream); });
  return status;
}

}  // namespace jax_fp8
