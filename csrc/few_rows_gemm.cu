// The launch: how a product is divided, and with which of the kernels in device/few_rows_gemm.cuh.
#include "few_rows_gemm.h"

#include <algorithm>
#include <optional>

#include "device/few_rows_gemm.cuh"
#include "kernel_launch.h"

namespace jax_fp8::few_rows_gemm {
namespace {

struct Device {
  int processors, shared_bytes;  // multiprocessors, and the most shared memory of a block
};

cudaError_t find_device(Device& device) {
  int number = 0;
  cudaError_t status = cudaGetDevice(&number);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, number);
  }
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, number);
  }
  constexpr int kStatic = 1024;  // more than the kernel's own arrays, and what the system reserves
  device.shared_bytes -= kStatic;
  return status;
}

int element_bytes(const Problem& problem) { return problem.a_is_bfloat16 ? 2 : 1; }

Course course_of(const Problem& problem, const Plan& plan) {
  return Course(plan, problem.preparation, problem.gated, problem.m, problem.n, problem.k, row_groups_of(problem.m),
                element_bytes(problem));
}

Layout layout_of(const Problem& problem, const Plan& plan) {
  return Layout(plan, course_of(problem, plan), problem.preparation, problem.scaling, problem.m, problem.k,
                row_groups_of(problem.m), element_bytes(problem));
}

// The same plan with phases: as few as fit in shared memory. Nothing if none fit.
std::optional<Plan> with_phases(const Problem& problem, Plan plan, const Device& device) {
  constexpr int kAtOnce = 32 * 1024;  // bytes of activations that a block copies before its first product
  const int groups = row_groups_of(problem.m), stages = stages_of(groups, plan.row_tiles);
  plan.phase_steps = 1;
  const Course course = course_of(problem, plan);
  const int steps = course.steps;
  for (const int tried : {steps, 4, 2, 1}) {
    plan.phase_steps = std::min(tried, steps);
    plan.ahead = static_cast<int>(divide_up(stages, plan.phase_steps));
    const int64_t bytes = int64_t{problem.m} * plan.phase_steps * plan.depth_warps * kChunk * element_bytes(problem);
    if (course.prepares && tried != steps) break;  // all of a block's part is prepared at once
    const bool is_too_much = !course.prepares && tried > 1 && plan.phase_steps == steps && bytes > kAtOnce;
    if (!is_too_much && layout_of(problem, plan).bytes <= device.shared_bytes) return plan;
  }
  return std::nullopt;
}

// A plan by its digits: steps of a phase (0: chosen here), cluster, row_tiles, row_warps and two of depth_warps.
// 12204 is no cluster, two tiles for each warp, two warps along the rows of b, and four along k.
std::optional<Plan> plan_by_digits(const Problem& problem, const Device& device) {
  const int digits = problem.config;
  Plan plan{.row_tiles = digits / 1000 % 10,
            .row_warps = digits / 100 % 10,
            .depth_warps = digits % 100,
            .cluster = digits / 10'000 % 10,
            .phase_steps = digits / 100'000,
            .ahead = 0};
  const int groups = row_groups_of(problem.m);
  const auto is_power = [](int number, int most) {
    return number > 0 && number <= most && (number & (number - 1)) == 0;
  };
  const bool is_good = is_power(plan.row_tiles, 2) && is_power(plan.row_warps, 8) && plan.depth_warps > 0 &&
                       is_power(plan.cluster, kMostCluster) && plan.phase_steps >= 0 && plan.phase_steps < 100 &&
                       plan.block_rows() <= kMostBlockRows && plan.threads() <= most_threads(groups) &&
                       (plan.row_tiles == 2 || (groups <= 2 && !problem.gated));
  if (!is_good) return std::nullopt;
  if (plan.phase_steps == 0) return with_phases(problem, plan, device);
  plan.ahead = static_cast<int>(divide_up(stages_of(groups, plan.row_tiles), plan.phase_steps));
  if (layout_of(problem, plan).bytes > device.shared_bytes) return std::nullopt;
  return plan;
}

// Eight warps, in blocks that all run at once where n allows it: of 32 rows of b, or 64, or 128. From 5 rows of a on,
// copying them costs a block more than sharing k with another block does, so blocks are twice as large. A small matrix
// has a long k shared by more blocks. Fewer warps where shared memory is small.
std::optional<Plan> chosen_plan(const Problem& problem, const Device& device, bool has_clusters) {
  const int64_t chunks = divide_up(problem.k, kChunk);
  Plan plan{.row_tiles = 2, .row_warps = 1, .depth_warps = 8, .cluster = 1, .phase_steps = 1, .ahead = 1};
  const auto double_rows = [&] { plan.row_warps *= 2, plan.depth_warps /= 2; };
  const auto blocks = [&] { return divide_up(problem.n, plan.block_rows()) * plan.cluster; };
  while (plan.row_warps < 4 && blocks() > device.processors) double_rows();
  const int steps = problem.m > 8 ? 2 : 4;  // of a block that shares k, before it is shared
  if (has_clusters && 2 * blocks() > device.processors && problem.m > 4 && plan.row_warps < 4) {
    double_rows();
    plan.cluster = 2;
  }
  while (has_clusters && plan.cluster < kMostCluster && 2 * blocks() <= device.processors &&
         chunks >= int64_t{steps} * plan.cluster * plan.depth_warps) {
    plan.cluster *= 2;
  }
  for (; plan.row_warps > 0; plan.row_warps /= 2) {
    for (Plan tried = plan; tried.depth_warps > 0; tried.depth_warps /= 2) {
      if (const auto found = with_phases(problem, tried, device)) return found;
    }
  }
  return std::nullopt;
}

template <typename Wide, Scaling kScaling, int kRowGroups, int kRowTiles>
cudaError_t launch(const Arguments& arguments, const Device& device, cudaStream_t stream) {
  const auto kernel_of = kernel<Wide, kScaling, kRowGroups, kRowTiles>;
  cudaError_t status = allow_shared_bytes(kernel_of, device.shared_bytes);
  if (status == cudaSuccess) status = prefer_shared_memory(kernel_of, 100);
  if (status != cudaSuccess) return status;
  const Plan& plan = arguments.plan;
  const Clusters clusters{
      .blocks = divide_up(arguments.problem.n, plan.block_rows()) * plan.cluster,
      .blocks_per_cluster = plan.cluster == 1 ? 0u : static_cast<unsigned>(plan.cluster),
      .threads = plan.threads(),
      .shared_bytes = static_cast<size_t>(arguments.layout.bytes),
  };
  return ClusterLaunch(clusters, stream, Begins::kEarly)(kernel_of, arguments);
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
  if (arguments.problem.a_is_bfloat16) {
    return has_tiles ? by_rows<BFloat16, Scaling::kSquares>(arguments, device, stream)
                     : by_rows<BFloat16, Scaling::kOne>(arguments, device, stream);
  }
  return has_tiles ? by_rows<Float16, Scaling::kLines>(arguments, device, stream)
                   : by_rows<Float16, Scaling::kOne>(arguments, device, stream);
}

}  // namespace

std::string enqueue(const Problem& problem, const Operands& operands, cudaStream_t stream) {
  Device device;
  bool has_clusters = false;
  cudaError_t status = find_device(device);
  if (status == cudaSuccess) status = find_clusters(kernel<Float16, Scaling::kOne, 1, 2>, has_clusters);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  const auto plan = problem.config == 0 ? chosen_plan(problem, device, has_clusters)
                                        : plan_by_digits(problem, device);
  if (!plan || (plan->cluster > 1 && !has_clusters)) {
    return "no kernel runs with config " + std::to_string(problem.config) + " on this device";
  }
  const Arguments arguments{problem, operands, *plan, course_of(problem, *plan), layout_of(problem, *plan),
                            Following::current()};
  status = by_types(arguments, device, stream);
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

}  // namespace jax_fp8::few_rows_gemm
