// The launch: how a product is divided, and with which of the kernels in device/few_rows_gemm.cuh.
#include "few_rows_gemm.h"

#include <algorithm>
#include <optional>

#include "device/few_rows_gemm.cuh"
#include "kernel_launch.h"
#include "tensor_map.h"

namespace jax_fp8::few_rows_gemm {
namespace {

struct Device {
  int processors, shared_bytes;  // multiprocessors, and the most shared memory of a block
  bool has_clusters;             // and boxes, and kernels that begin early
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
  if (status == cudaSuccess) status = find_clusters(kernel<Float16, Scaling::kOne, 1, 2, false>, device.has_clusters);
  constexpr int kStatic = 2048;  // more than the kernel's own arrays, and what the system reserves
  device.shared_bytes -= kStatic;
  return status;
}

int element_bytes(const Problem& problem) { return problem.a_is_bfloat16 ? 2 : 1; }

Course course_of(const Problem& problem, const Plan& plan) {
  return Course(plan, problem.preparation, problem.gated, problem.m, problem.n, problem.k, element_bytes(problem));
}

Layout layout_of(const Problem& problem, const Plan& plan) {
  return Layout(plan, course_of(problem, plan), problem.preparation, problem.scaling, problem.m, problem.k,
                row_groups_of(problem.m), element_bytes(problem));
}

int64_t blocks_of(const Problem& problem, const Plan& plan) {
  return divide_up(problem.n, plan.block_rows()) * plan.cluster;
}

constexpr int kMostRingBytes = 192 * 1024;
constexpr int kRingBytesOfTwo = 64 * 1024;  // of each of two blocks on a multiprocessor

// The same plan with a ring of weights. Of boxes it holds at most so many bytes. In a step a warp multiplies two boxes,
// unless few steps would fit then.
Plan with_ring(const Problem& problem, Plan plan, bool is_boxed, int bytes = kMostRingBytes) {
  plan.boxed = is_boxed;
  if (!is_boxed) {
    plan.step_chunks = 1, plan.stages = stages_of(row_groups_of(problem.m), plan.row_tiles);
    return plan;
  }
  const int64_t chunks = divide_up(divide_up(problem.k, kChunk), plan.cluster);
  const auto steps = [&](int step_chunks) {
    return static_cast<int>(divide_up(chunks, int64_t{plan.depth_warps} * step_chunks));
  };
  const int box_bytes = plan.depth_warps * plan.block_rows() * kChunk;
  if (plan.step_chunks == 0) {
    const bool is_worth = steps(2) < steps(1) && std::min(3, steps(2)) * 2 * box_bytes <= bytes;
    plan.step_chunks = is_worth ? 2 : 1;
  }
  if (plan.stages == 0) plan.stages = std::clamp(bytes / (plan.step_chunks * box_bytes), 1, kMostStages);
  return plan;
}

// The same plan with phases: as few as fit in shared memory. Nothing if none fit.
std::optional<Plan> with_phases(const Problem& problem, Plan plan, const Device& device) {
  constexpr int kAtOnce = 32 * 1024;  // bytes of activations that a block copies before its first product
  plan.phase_steps = 1;
  const Course course = course_of(problem, plan);
  const int steps = course.steps;
  for (const int tried : {steps, 4, 2, 1}) {
    plan.phase_steps = std::min(tried, steps);
    plan.ahead = static_cast<int>(divide_up(plan.stages, plan.phase_steps));
    const int64_t columns = int64_t{plan.phase_steps} * plan.depth_warps * plan.step_chunks * kChunk;
    const int64_t bytes = problem.m * columns * element_bytes(problem);
    if (course.prepares && tried != steps) break;  // all of a block's part is prepared at once
    const bool is_too_much = !course.prepares && tried > 1 && plan.phase_steps == steps && bytes > kAtOnce;
    if (!is_too_much && layout_of(problem, plan).bytes <= device.shared_bytes) return plan;
  }
  return std::nullopt;
}

// The same plan with as large a ring of boxes as fits, of two steps or more if a block has them. If not all blocks run
// at once, two share a multiprocessor where they can.
std::optional<Plan> with_boxes(const Problem& problem, const Plan& plan, const Device& device) {
  if (blocks_of(problem, plan) > device.processors) {
    const auto found = with_phases(problem, with_ring(problem, plan, true, kRingBytesOfTwo), device);
    if (found && layout_of(problem, *found).bytes <= device.shared_bytes / 2 - 1024) return found;
  }
  for (const int step_chunks : {0, 1}) {
    Plan tried = plan;
    tried.step_chunks = step_chunks;
    for (tried = with_ring(problem, tried, true); tried.stages > 0; --tried.stages) {
      const auto found = with_phases(problem, tried, device);
      if (found && (tried.stages > 1 || course_of(problem, tried).steps == 1 || plan.depth_warps == 1)) return found;
    }
  }
  return std::nullopt;
}

// A plan by its digits: stages, chunks of a step and two of the steps of a phase (0: chosen here), cluster, row_tiles,
// row_warps and two of depth_warps. 12204 is no cluster, two tiles for each warp, two warps along the rows of b, and
// four along k.
std::optional<Plan> plan_by_digits(const Problem& problem, const Device& device, bool is_boxed) {
  const int digits = problem.config;
  Plan plan{.row_tiles = digits / 1000 % 10,
            .row_warps = digits / 100 % 10,
            .depth_warps = digits % 100,
            .cluster = digits / 10'000 % 10,
            .phase_steps = digits / 100'000 % 100,
            .ahead = 0,
            .step_chunks = digits / 10'000'000 % 10,
            .stages = digits / 100'000'000,
            .boxed = false};
  const int groups = row_groups_of(problem.m);
  const auto is_power = [](int number, int most) {
    return number > 0 && number <= most && (number & (number - 1)) == 0;
  };
  const bool is_good = is_power(plan.row_tiles, 2) && is_power(plan.row_warps, 8) && plan.depth_warps > 0 &&
                       is_power(plan.cluster, kMostCluster) &&
                       (is_boxed ? plan.stages <= kMostStages : plan.stages == 0 && plan.step_chunks <= 1) &&
                       plan.block_rows() <= kMostBlockRows && plan.threads() <= most_threads(groups) &&
                       (plan.row_tiles == 2 || (groups <= 2 && !problem.gated));
  if (!is_good) return std::nullopt;
  plan = with_ring(problem, plan, is_boxed);
  if (plan.phase_steps == 0 || is_boxed) return with_phases(problem, plan, device);
  plan.ahead = static_cast<int>(divide_up(plan.stages, plan.phase_steps));
  if (layout_of(problem, plan).bytes > device.shared_bytes) return std::nullopt;
  return plan;
}

// Eight warps, in blocks that all run at once where n allows it: of 32 rows of b, or 64, or 128. From 5 rows of a on,
// copying them costs a block more than sharing k with another block does, so blocks are twice as large. A small matrix
// has a long k shared by more blocks. Fewer warps where shared memory is small.
std::optional<Plan> chosen_plan(const Problem& problem, const Device& device) {
  const int64_t chunks = divide_up(problem.k, kChunk);
  Plan plan{.row_tiles = 2, .row_warps = 1, .depth_warps = 8, .cluster = 1, .phase_steps = 1, .ahead = 1,
            .step_chunks = 0, .stages = 0, .boxed = false};
  const auto double_rows = [&] { plan.row_warps *= 2, plan.depth_warps /= 2; };
  const auto blocks = [&] { return blocks_of(problem, plan); };
  while (plan.row_warps < 4 && blocks() > device.processors) double_rows();
  const int steps = problem.m > 8 ? 2 : 4;  // of a block that shares k, before it is shared
  if (device.has_clusters && 2 * blocks() > device.processors && problem.m > 4 && plan.row_warps < 4) {
    double_rows();
    plan.cluster = 2;
  }
  while (device.has_clusters && plan.cluster < kMostCluster && 2 * blocks() <= device.processors &&
         chunks >= int64_t{steps} * plan.cluster * plan.depth_warps) {
    plan.cluster *= 2;
  }
  for (; plan.row_warps > 0; plan.row_warps /= 2) {
    for (Plan tried = plan; tried.depth_warps > 0; tried.depth_warps /= 2) {
      if (const auto found = with_phases(problem, with_ring(problem, tried, false), device)) return found;
    }
  }
  return std::nullopt;
}

// With boxes. Eight warps for 32 rows of b, sixteen for 64 and eight for 128 were the fastest on an H200, in whole
// layers of 1.3B and of 8B. From 5 rows of a on, preparing them costs a block more: so twice as many warps do it, and
// where k is short, blocks of 64 rows share it. Where the rows of a do not fit, more blocks share k.
std::optional<Plan> chosen_boxed_plan(const Problem& problem, const Device& device) {
  const int64_t chunks = divide_up(problem.k, kChunk);
  const bool is_many = problem.m > 4;
  Plan plan{.row_tiles = 2, .row_warps = 1, .depth_warps = 8, .cluster = 1, .phase_steps = 1, .ahead = 1,
            .step_chunks = 0, .stages = 0, .boxed = true};
  const auto blocks = [&] { return blocks_of(problem, plan); };
  if (is_many && chunks >= 32) plan.depth_warps = 16;
  if (is_many && chunks < 32) plan.row_warps = 2;
  while (plan.row_warps < 4 && blocks() > device.processors) {
    plan.row_warps *= 2;
    plan.depth_warps = plan.row_warps == 2 ? 8 : 2;
  }
  const int steps = is_many ? 2 : 4;  // of a block that shares k, before it is shared
  while (plan.cluster < kMostCluster && 2 * blocks() <= device.processors &&
         chunks >= int64_t{steps} * plan.cluster * plan.depth_warps) {
    plan.cluster *= 2;
  }
  for (; plan.cluster <= kMostCluster; plan.cluster *= 2) {
    for (Plan tried = plan; tried.depth_warps > 0; tried.depth_warps /= 2) {
      if (const auto found = with_boxes(problem, tried, device)) return found;
    }
    if (plan.row_warps < 4) plan.row_warps *= 2, plan.depth_warps = std::max(1, plan.depth_warps / 2);
  }
  return std::nullopt;
}

template <typename Wide, Scaling kScaling, int kRowGroups, int kRowTiles, bool kBoxed>
cudaError_t launch_with(const Arguments& arguments, const Device& device, cudaStream_t stream) {
  const auto kernel_of = kernel<Wide, kScaling, kRowGroups, kRowTiles, kBoxed>;
  cudaError_t status = allow_shared_bytes(kernel_of, device.shared_bytes);
  if (status == cudaSuccess) status = prefer_shared_memory(kernel_of, 100);
  if (status != cudaSuccess) return status;
  const Plan& plan = arguments.plan;
  const Clusters clusters{
      .blocks = divide_up(arguments.problem.n, plan.block_rows()) * plan.cluster,
      .blocks_per_cluster = plan.cluster == 1 ? 0u : static_cast<unsigned>(plan.cluster),
      .threads = plan.threads() + (plan.boxed ? 32 : 0),
      .shared_bytes = static_cast<size_t>(arguments.layout.bytes),
  };
  return ClusterLaunch(clusters, stream, device.has_clusters ? Begins::kEarly : Begins::kInTurn)(kernel_of, arguments);
}

template <typename Wide, Scaling kScaling, int kRowGroups, int kRowTiles>
cudaError_t launch(const Arguments& arguments, const Device& device, cudaStream_t stream) {
  constexpr bool kBoxed = may_be_boxed(kRowGroups, kScaling);
  return arguments.plan.boxed ? launch_with<Wide, kScaling, kRowGroups, kRowTiles, kBoxed>(arguments, device, stream)
                              : launch_with<Wide, kScaling, kRowGroups, kRowTiles, false>(arguments, device, stream);
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
  Device device = {};
  cudaError_t status = find_device(device);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  const Preparation& preparation = problem.preparation;
  const bool is_boxed = device.has_clusters && (preparation.normalizes || preparation.casts) &&
                       may_be_boxed(row_groups_of(problem.m), problem.scaling);
  const auto plan = problem.config != 0 ? plan_by_digits(problem, device, is_boxed)
                    : is_boxed          ? chosen_boxed_plan(problem, device)
                                        : chosen_plan(problem, device);
  if (!plan || (plan->cluster > 1 && !device.has_clusters)) {
    return "no kernel runs with config " + std::to_string(problem.config) + " on this device";
  }
  Arguments arguments{{}, problem, operands, *plan, course_of(problem, *plan), layout_of(problem, *plan),
                      Following::current() && device.has_clusters};
  if (plan->boxed) {
    const int box_rows = plan->block_rows() / arguments.course.parts;
    std::string error = describe(&arguments.weights, operands.b, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1,
                                 {problem.k, problem.n, 1}, box_rows);
    if (!error.empty()) return error;
  }
  status = by_types(arguments, device, stream);
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

}  // namespace jax_fp8::few_rows_gemm
