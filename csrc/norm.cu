// The launch: which kernel, how many threads and how much shared memory. The kernels are in device/norm_row.cuh,
// device/norm_cluster.cuh, device/norm.cuh and device/norm_backward.cuh. By tiles it is
// device/norm_cluster_by_tile.cuh, or one of the others for the statistics and device/quantize_by_tile.cuh for the
// cast.
#include "norm.h"

#include <algorithm>

#include "device/by_dtype.cuh"
#include "device/column_sums.cuh"
#include "device/norm.cuh"
#include "device/norm_backward.cuh"
#include "device/norm_by_tile.cuh"
#include "device/norm_cluster.cuh"
#include "device/norm_cluster_by_tile.cuh"
#include "device/norm_row.cuh"
#include "device/quantize_by_tile.cuh"
#include "kernel_launch.h"
#include "launch.h"

namespace jax_fp8 {
namespace {

// The most shared memory that a block may use.
cudaError_t find_shared_bytes(int& bytes) {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

// ---- forward --------------------------------------------------------------------------------------------------------

// Launches the kernel in clusters if the device has them and room for one; then `launched` becomes true. Clusters of up
// to 8 blocks always have room.
template <typename... Parameters, typename... Arguments>
cudaError_t try_clusters(void (*kernel)(Parameters...), const Clusters& clusters, int carveout, cudaStream_t stream,
                         bool& launched, const Arguments&... arguments) {
  bool found = false;
  cudaError_t status = find_clusters(kernel, found);
  if (status != cudaSuccess || !found) return status;
  status = prefer_shared_memory(kernel, carveout);
  if (status == cudaSuccess) status = allow_shared_bytes(kernel, static_cast<int>(clusters.shared_bytes));
  const ClusterLaunch launch(clusters, stream);
  if (status == cudaSuccess && clusters.blocks_per_cluster > 8) {
    int at_once = 0;
    status = launch.find_room(kernel, at_once);
    if (status == cudaSuccess && at_once == 0) return cudaSuccess;
  }
  if (status != cudaSuccess) return status;
  launched = true;
  return launch(kernel, arguments...);
}

// The log2 of the number of blocks that share a row of `cols` columns.
template <typename T>
int log2_blocks_of(int64_t cols) {
  int log2_blocks = 0;
  while (cols > int64_t{norm::kClusterCols<T>} << log2_blocks) ++log2_blocks;
  return log2_blocks;
}

template <typename T, Fp8Type kFormat, bool kCasts>
cudaError_t try_norm(const norm::Rows<T>& input, const DeviceScaleSource& scale, const NormResults& results,
                     cudaStream_t stream, bool& launched) {
  const int log2_blocks = log2_blocks_of<T>(input.cols);
  if (1 << log2_blocks > norm::kMostParts) return cudaSuccess;
  const Clusters clusters{
      .blocks = divide_up(input.rows, norm::kClusterRows) << log2_blocks,
      .blocks_per_cluster = 1u << log2_blocks,
      .threads = norm::kClusterThreads,
      .shared_bytes = 0,
  };
  return try_clusters(norm::cluster_kernel<T, kFormat, kCasts>, clusters, norm::kClusterCarveout, stream, launched,
                      input, scale, log2_blocks, results);
}

template <typename T>
cudaError_t try_norm_by_tile(const norm::Rows<T>& input, float* mean, float* rstd, const ByTileResults& results,
                             cudaStream_t stream, bool& launched) {
  const int log2_blocks = log2_blocks_of<T>(input.cols);
  const bool has_whole_tiles = log2_blocks == 0 || input.cols % (int64_t{kTile} << log2_blocks) == 0;
  if (1 << log2_blocks > norm_by_tile::kMostParts || !has_whole_tiles) return cudaSuccess;
  const Clusters clusters{
      .blocks = divide_up(input.rows, kTile) * norm_by_tile::kBands << log2_blocks,
      .blocks_per_cluster = norm_by_tile::kBands * 1u << log2_blocks,
      .threads = norm_by_tile::kThreads,
      .shared_bytes = norm_by_tile::kStagedBytes<T>,
  };
  const by_tile::Task task{
      .results = results, .rule = by_tile::amax_rule_of(results.cast.rule), .cols = input.cols, .tiles_per_row = 0};
  return try_clusters(norm_by_tile::cluster_kernel<T>, clusters, norm_by_tile::kCarveout<T>, stream, launched, input,
                      log2_blocks, mean, rstd, task);
}

// The columns that shared memory cannot hold are read a second time, from L2.
template <typename T, Fp8Type kFormat>
cudaError_t launch_rows(const norm::Rows<T>& input, const DeviceScaleSource& scale, const NormResults& results,
                        cudaStream_t stream) {
  constexpr int kColumnBytes = norm::kBlockRows * sizeof(T);
  constexpr int kSlices = norm::kRowsThreads / kWarp * norm::kSliceBytes;
  constexpr int kStatic = 1024;  // more than the kernel's own arrays
  int available = 0;
  cudaError_t status = find_shared_bytes(available);
  if (status != cudaSuccess) return status;
  const int fitting = (available - kStatic - kSlices) / kColumnBytes / norm::kSliceCols * norm::kSliceCols;
  const int held = std::min(static_cast<int>(input.cols), fitting);
  const int bytes = held * kColumnBytes + kSlices;
  const auto kernel = norm::rows_kernel<T, kFormat>;
  status = allow_shared_bytes(kernel, available - kStatic);
  // The largest carveout, so that as many blocks as possible fit.
  if (status == cudaSuccess) status = prefer_shared_memory(kernel, 100);
  if (status != cudaSuccess) return status;
  const auto blocks = static_cast<unsigned>(input.rows / norm::kBlockRows);
  kernel<<<blocks, norm::kRowsThreads, bytes, stream>>>(input, scale, held, results);
  return cudaGetLastError();
}

template <typename T, Fp8Type kFormat>
cudaError_t launch_single_rows(const norm::Rows<T>& input, const DeviceScaleSource& scale, const NormResults& results,
                               cudaStream_t stream) {
  const auto kernel = norm::row_kernel<T, kFormat>;
  kernel<<<static_cast<unsigned>(input.rows), norm::kRowThreads, 0, stream>>>(input, scale, results);
  return cudaGetLastError();
}

template <typename T, Fp8Type kFormat>
cudaError_t launch_any(const norm::Rows<T>& input, const DeviceScaleSource& scale, const NormResults& results,
                       cudaStream_t stream) {
  // A matrix without rows has a scale too: one block runs and writes it.
  const auto blocks = static_cast<unsigned>(std::max<int64_t>(divide_up(input.rows, norm::kAnyRows), 1));
  const auto kernel = norm::any_kernel<T, kFormat>;
  kernel<<<blocks, norm::kAnyThreads, 0, stream>>>(input, scale, results);
  return cudaGetLastError();
}

cudaError_t launch(const NormArguments& arguments, const DeviceScaleSource& scale, Fp8Type format,
                   const NormResults& results, cudaStream_t stream) {
  cudaError_t status = cudaMemsetAsync(results.amax, 0, sizeof(float), stream);
  if (status != cudaSuccess) return status;
  const bool aligned =
      are_aligned({arguments.x, arguments.norm_scale, arguments.norm_bias, results.values, results.values_t});
  // Such numbers of rows come from text generation.
  const bool few = aligned && arguments.rows % norm::kBlockRows != 0 && arguments.rows <= norm::kMostSingleRows &&
                   arguments.cols % kVectorWidth == 0 && arguments.cols <= norm::kMostRowCols;
  const bool vectorized = aligned && arguments.rows > 0 && arguments.rows % norm::kBlockRows == 0 &&
                          arguments.cols % 16 == 0 && arguments.cols <= norm::kMaxCols;
  by_dtype(arguments.x_type, format, [&](auto element, auto fp8) {
    using T = decltype(element);
    constexpr Fp8Type kFormat = decltype(fp8)::value;
    const norm::Rows<T> input{static_cast<const T*>(arguments.x), arguments.norm_scale, arguments.norm_bias,
                              arguments.epsilon, arguments.rows, arguments.cols};
    bool launched = few;
    if (few) status = launch_single_rows<T, kFormat>(input, scale, results, stream);
    if (vectorized && !launched) {
      const auto launch_clusters =
          norm::quantizes(scale) ? try_norm<T, kFormat, true> : try_norm<T, Fp8Type::kE4M3, false>;
      status = launch_clusters(input, scale, results, stream, launched);
    }
    if (status != cudaSuccess || launched) return;
    const auto launch_kernel = vectorized ? launch_rows<T, kFormat> : launch_any<T, kFormat>;
    status = launch_kernel(input, scale, results, stream);
  });
  return status;
}

// ---- backward -------------------------------------------------------------------------------------------------------

// How a block divides a row among its threads: in the fewest passes, then with the fewest warps.
struct Division {
  int passes, threads, shared_bytes;
};

Division division_of(int64_t cols) {
  const int64_t vectors = cols / kVectorWidth;
  const int64_t passes = divide_up(vectors, norm_backward::kManyThreads);
  const int64_t threads = divide_up(divide_up(vectors, passes), kWarp) * kWarp;
  const int64_t bytes = 4 * passes * threads * static_cast<int64_t>(sizeof(float4));
  return {static_cast<int>(passes), static_cast<int>(threads), static_cast<int>(bytes)};
}

constexpr int kBackwardStatic = 4096;  // more than the kernels' own arrays

bool is_vectorized(const NormBackwardArguments& arguments, int available) {
  return arguments.cols % kVectorWidth == 0 && arguments.cols <= norm_backward::kMaxCols &&
         division_of(arguments.cols).shared_bytes + kBackwardStatic <= available &&
         are_aligned({arguments.dy, arguments.x, arguments.residual, arguments.norm_scale, arguments.dx,
                      arguments.dscale_partials, arguments.dbias_partials});
}

template <typename T, int kThreads>
cudaError_t launch_backward_rows(const norm_backward::Gradients<T>& gradients, int available, int64_t blocks,
                                 cudaStream_t stream) {
  const Division division = division_of(gradients.cols);
  const auto kernel = norm_backward::rows_kernel<T, kThreads>;
  const cudaError_t allowed = allow_shared_bytes(kernel, available - kBackwardStatic);
  if (allowed != cudaSuccess) return allowed;
  kernel<<<static_cast<unsigned>(blocks), division.threads, division.shared_bytes, stream>>>(
      gradients, division.passes);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_backward_any(const norm_backward::Gradients<T>& gradients, int, int64_t blocks,
                                cudaStream_t stream) {
  const auto kernel = norm_backward::any_kernel<T>;
  kernel<<<static_cast<unsigned>(blocks), norm_backward::kAnyThreads, 0, stream>>>(gradients);
  return cudaGetLastError();
}

// Sets `blocks` to the number of rows of partial sums that the kernel writes.
template <typename T>
cudaError_t launch_gradients(const NormBackwardArguments& arguments, int available, int64_t& blocks,
                             cudaStream_t stream) {
  const norm_backward::Gradients<T> gradients{
      .dy = static_cast<const T*>(arguments.dy),
      .x = static_cast<const T*>(arguments.x),
      .residual = static_cast<const T*>(arguments.residual),
      .norm_scale = arguments.norm_scale,
      .mean = arguments.mean,
      .rstd = arguments.rstd,
      .dx = static_cast<T*>(arguments.dx),
      .dscale = arguments.dscale_partials,
      .dbias = arguments.dbias_partials,
      .rows = arguments.rows,
      .cols = arguments.cols,
  };
  const auto launch_kernel = [&](auto kernel, int64_t rows_per_block) {
    blocks = std::min(arguments.partials, divide_up(arguments.rows, rows_per_block));
    return kernel(gradients, available, blocks, stream);
  };
  constexpr int kFew = norm_backward::kFewThreads, kMany = norm_backward::kManyThreads;
  if (!is_vectorized(arguments, available)) return launch_kernel(launch_backward_any<T>, 1);
  if (arguments.cols <= kFew * kVectorWidth) {
    return launch_kernel(launch_backward_rows<T, kFew>, norm_backward::kBlockRows<T, kFew>);
  }
  return launch_kernel(launch_backward_rows<T, kMany>, norm_backward::kBlockRows<T, kMany>);
}

}  // namespace

cudaError_t launch_norm_quantize(const NormQuantizeArguments& arguments, cudaStream_t stream) {
  const DeviceScaleSource scale = on_device(arguments.source, arguments.scale);
  return launch(arguments.norm, scale, arguments.format, arguments.results, stream);
}

cudaError_t launch_norm_quantize_by_tile(const NormQuantizeByTileArguments& arguments, cudaStream_t stream) {
  const NormArguments& problem = arguments.norm;
  const TileCast& cast = arguments.cast;
  const bool aligned = are_aligned({problem.x, problem.norm_scale, problem.norm_bias, cast.values, cast.values_t});
  const bool for_clusters = aligned && problem.rows > 0 && problem.rows % 16 == 0 && problem.cols % 16 == 0 &&
                            problem.cols <= norm::kMaxCols && !cast.rule.square && !cast.rule.square_t;
  const ByTileResults results{.cast = cast, .sums = {}, .companion = {}, .rows = problem.rows, .width = problem.cols};
  cudaError_t status = cudaMemsetAsync(cast.amax, 0, sizeof(float), stream);
  if (status != cudaSuccess) return status;
  by_dtype(problem.x_type, [&](auto element) {
    using T = decltype(element);
    const norm::Rows<T> input{static_cast<const T*>(problem.x), problem.norm_scale, problem.norm_bias, problem.epsilon,
                              problem.rows, problem.cols};
    bool launched = false;
    if (for_clusters) status = try_norm_by_tile(input, arguments.mean, arguments.rstd, results, stream, launched);
    if (status != cudaSuccess || launched) return;
    const NormResults statistics{
        .values = nullptr, .values_t = nullptr, .amax = cast.amax, .mean = arguments.mean, .rstd = arguments.rstd};
    status = launch(problem, DeviceScaleSource{}, Fp8Type::kE4M3, statistics, stream);
    if (status != cudaSuccess) return;
    status = launch_by_tile(norm::Normalized<T>{input, arguments.mean, arguments.rstd}, results, aligned, stream);
  });
  return status;
}

cudaError_t launch_norm_amax(const NormArguments& arguments, float* amax, cudaStream_t stream) {
  const NormResults results{.values = nullptr, .values_t = nullptr, .amax = amax, .mean = nullptr, .rstd = nullptr};
  return launch(arguments, DeviceScaleSource{}, Fp8Type::kE4M3, results, stream);
}

cudaError_t launch_norm_backward(const NormBackwardArguments& arguments, cudaStream_t stream) {
  int available = 0;
  cudaError_t status = find_shared_bytes(available);
  if (status != cudaSuccess) return status;
  int64_t blocks = 0;  // without rows there are no partial sums, and the sums are zeros
  if (arguments.rows > 0) {
    by_dtype(arguments.type, [&](auto element) {
      status = launch_gradients<decltype(element)>(arguments, available, blocks, stream);
    });
  }
  if (status != cudaSuccess) return status;
  launch_column_sums({arguments.dscale, arguments.dscale_partials}, {arguments.dbias, arguments.dbias_partials}, blocks,
                     arguments.cols, stream);
  return cudaGetLastError();
}

}  // namespace jax_fp8
