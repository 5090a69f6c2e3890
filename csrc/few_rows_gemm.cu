// The launch: with which of the kernels in device/few_rows_gemm.cuh, by the plan of few_rows_gemm_plans.h.
#include "few_rows_gemm.h"

#include "device/few_rows_gemm.cuh"
#include "device/few_rows_gemm_rows.cuh"
#include "few_rows_gemm_plans.h"
#include "kernel_launch.h"
#include "tensor_map.h"

namespace jax_fp8::few_rows_gemm {
namespace {

// Whether the code for warpgroups was compiled for this device. Else that kernel declares nothing in shared memory.
cudaError_t find_warpgroups(bool& found) {
  cudaFuncAttributes compiled;
  const cudaError_t status =
      cudaFuncGetAttributes(&compiled, kernel<Float16, Scaling::kOne, 8, 1, Way::kWarpgroups>);
  found = status == cudaSuccess && compiled.sharedSizeBytes > 0;
  return status;
}

cudaError_t find_device(Device& device) {
  int number = 0;
  cudaError_t status = cudaGetDevice(&number);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, number);
  }
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, number);
  }
  if (status == cudaSuccess) {
    status = find_clusters(kernel<Float16, Scaling::kOne, 1, 2, Way::kLanes>, device.has_clusters);
  }
  if (status == cudaSuccess) status = find_warpgroups(device.has_warpgroups);
  constexpr int kStatic = 2048;  // more than the kernel's own arrays, and what the system reserves
  device.shared_bytes -= kStatic;
  return status;
}

template <typename Wide, Scaling kScaling, int kRowGroups, int kRowTiles, Way kWay>
cudaError_t launch_with(const Arguments& arguments, const Device& device, cudaStream_t stream) {
  const auto kernel_of = kernel<Wide, kScaling, kRowGroups, kRowTiles, kWay>;
  cudaError_t status = allow_shared_bytes(kernel_of, device.shared_bytes);
  if (status == cudaSuccess) status = prefer_shared_memory(kernel_of, 100);
  if (status != cudaSuccess) return status;
  const Plan& plan = arguments.plan;
  const Clusters clusters{
      .blocks = divide_up(arguments.problem.n, plan.block_rows()) * plan.cluster,
      .blocks_per_cluster = plan.cluster == 1 ? 0u : static_cast<unsigned>(plan.cluster),
      .threads = plan.threads() + (plan.boxed() ? 32 : 0),
      .shared_bytes = static_cast<size_t>(arguments.layout.bytes),
  };
  return ClusterLaunch(clusters, stream, device.has_clusters ? Begins::kEarly : Begins::kInTurn)(kernel_of, arguments);
}

template <typename Wide, Scaling kScaling, int kRowGroups, int kRowTiles>
cudaError_t launch(const Arguments& arguments, const Device& device, cudaStream_t stream) {
  if constexpr (kRowGroups == 1 && kScaling != Scaling::kLines) {
    if (arguments.plan.way == Way::kBoxes) {
      return launch_with<Wide, kScaling, kRowGroups, kRowTiles, Way::kBoxes>(arguments, device, stream);
    }
  }
  return launch_with<Wide, kScaling, kRowGroups, kRowTiles, Way::kLanes>(arguments, device, stream);
}

// The device has clusters, and so code that waits by itself.
template <int kPieces>
cudaError_t launch_pieces(const Problem& problem, const RawRows& rows, cudaStream_t stream) {
  const Clusters clusters{
      .blocks = int64_t{problem.m} * rows.blocks_of_row,
      .blocks_per_cluster = 0,
      .threads = kPrepareThreads,
      .shared_bytes = 0,
  };
  return ClusterLaunch(clusters, stream, Begins::kEarly)(prepare_kernel<kPieces>, rows);
}

// Normalizes and casts the rows of a, for warpgroups.
cudaError_t launch_preparation(const Problem& problem, const Operands& operands, cudaStream_t stream) {
  const int pieces = static_cast<int>(divide_up(problem.k, kPieceColumns));
  const bool normalizes = problem.preparation.normalizes;
  const RawRows rows{
      .x = static_cast<const BFloat16*>(operands.a),
      .scale = operands.a_scale,
      .norm_scale = normalizes ? operands.norm_scale : nullptr,
      .norm_bias = normalizes ? operands.norm_bias : nullptr,
      .epsilon = problem.preparation.epsilon,
      .k = problem.k,
      .blocks_of_row = normalizes ? 1 : pieces,
      .rows = static_cast<uint8_t*>(operands.rows),
  };
  if (!normalizes || pieces == 1) return launch_pieces<1>(problem, rows, stream);
  return pieces == 2 ? launch_pieces<2>(problem, rows, stream) : launch_pieces<kMostPieces>(problem, rows, stream);
}

template <Scaling kScaling>
cudaError_t launch_warpgroups(const Arguments& arguments, const Device& device, cudaStream_t stream) {
  switch (row_groups_of(arguments.problem.m)) {
    case 1: return launch_with<Float16, kScaling, 1, 1, Way::kWarpgroups>(arguments, device, stream);
    case 2: return launch_with<Float16, kScaling, 2, 1, Way::kWarpgroups>(arguments, device, stream);
    case 4: return launch_with<Float16, kScaling, 4, 1, Way::kWarpgroups>(arguments, device, stream);
    default: return launch_with<Float16, kScaling, 8, 1, Way::kWarpgroups>(arguments, device, stream);
  }
}

template <typename Wide, Scaling kScaling>
cudaError_t by_rows(const Arguments& arguments, const Device& device, cudaStream_t stream) {
  const bool one = arguments.plan.row_tiles == 1;
  switch (row_groups_of(arguments.problem.m)) {
    case 1:
      return one ? launch<Wide, kScaling, 1, 1>(arguments, device, stream)
                 : launch<Wide, kScaling, 1, 2>(arguments, device, stream);
    case 2:
      return one ? launch<Wide, kScaling, 2, 1>(arguments, device, stream)
                 : launch<Wide, kScaling, 2, 2>(arguments, device, stream);
    case 4: return launch<Wide, kScaling, 4, 2>(arguments, device, stream);
    default: return launch<Wide, kScaling, 8, 2>(arguments, device, stream);
  }
}

cudaError_t by_types(const Arguments& arguments, const Device& device, cudaStream_t stream) {
  const bool has_tiles = arguments.problem.scaling != Scaling::kOne;
  if (arguments.plan.way == Way::kWarpgroups) {
    return has_tiles ? launch_warpgroups<Scaling::kLines>(arguments, device, stream)
                     : launch_warpgroups<Scaling::kOne>(arguments, device, stream);
  }
  if (arguments.problem.a_is_bfloat16) {
    return has_tiles ? by_rows<BFloat16, Scaling::kSquares>(arguments, device, stream)
                     : by_rows<BFloat16, Scaling::kOne>(arguments, device, stream);
  }
  return has_tiles ? by_rows<Float16, Scaling::kLines>(arguments, device, stream)
                   : by_rows<Float16, Scaling::kOne>(arguments, device, stream);
}

}  // namespace

std::string enqueue(const Problem& problem, Operands operands, cudaStream_t stream) {
  Device device = {};
  cudaError_t status = find_device(device);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  const auto plan = plan_of(problem, device);
  const bool has_warpgroups = plan && plan->way == Way::kWarpgroups;
  if (problem.needs_warpgroups() && !has_warpgroups) {
    return "more than " + std::to_string(kMostPreparedRows) + " rows are normalized, activated or cast only by code " +
           "for compute capability 9.0a, and this build has none for this device; compile it for 90a-real";
  }
  if (!plan || (plan->cluster > 1 && !device.has_clusters)) {
    return "no kernel runs with config " + std::to_string(problem.config) + " on this device";
  }
  const bool is_prepared = has_warpgroups && problem.prepares();
  if (is_prepared) {
    status = launch_preparation(problem, operands, stream);
    if (status != cudaSuccess) return cudaGetErrorString(status);
    operands.a = operands.rows;
  }
  const Following following(is_prepared || Following::current());
  Arguments arguments{{}, {}, problem, operands, *plan, course_of(problem, *plan), layout_of(problem, *plan),
                      Following::current() && device.has_clusters};
  if (plan->boxed()) {
    const Course& course = arguments.course;
    const int box_rows = plan->block_rows() / course.parts, chunks = course.has_chunk_boxes ? plan->step_chunks : 1;
    std::string error;
    if (has_warpgroups) {
      error = describe_chunks(&arguments.weights, operands.b, {problem.k, course.d_columns, course.parts}, box_rows,
                              chunks);
      if (error.empty()) {
        error = describe_chunks(&arguments.rows, operands.a, {problem.k, problem.m, 1}, course.box_rows, chunks);
      }
    } else {
      error = describe(&arguments.weights, operands.b, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, {problem.k, problem.n, 1},
                       box_rows);
    }
    if (!error.empty()) return error;
  }
  status = by_types(arguments, device, stream);
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

}  // namespace jax_fp8::few_rows_gemm
