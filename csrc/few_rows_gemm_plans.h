// How a product of few rows is divided among blocks and warps: the choice for a shape and a device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "device/few_rows_gemm_plan.cuh"
#include "few_rows_gemm.h"

namespace jax_fp8::few_rows_gemm {

struct Device {
  int processors, shared_bytes;  // multiprocessors, and the most shared memory of a block
  bool has_clusters;             // and boxes, and kernels that begin early
  bool has_warpgroups;
};

// Rows of b that a block may have.
inline int most_block_rows(const Problem& problem, Way way) {
  return way == Way::kWarpgroups && problem.scaling == Scaling::kOne ? kMostBlockRows : kSquareRows;
}

inline int element_bytes(const Problem& problem) { return problem.a_is_bfloat16 ? 2 : 1; }

// Of rows that a kernel of their own prepares, the product knows nothing.
inline Preparation preparation_of(const Problem& problem, const Plan& plan) {
  return plan.way == Way::kWarpgroups ? Preparation{} : problem.preparation;
}

inline Course course_of(const Problem& problem, const Plan& plan) {
  return Course(plan, preparation_of(problem, plan), problem.gated, problem.m, problem.n, problem.k,
                element_bytes(problem));
}

inline Layout layout_of(const Problem& problem, const Plan& plan) {
  return Layout(plan, course_of(problem, plan), preparation_of(problem, plan), problem.scaling, problem.m, problem.k,
                row_groups_of(problem.m), element_bytes(problem), problem.d == SourceType::kFloat32 ? 4 : 2);
}

inline int64_t blocks_of(const Problem& problem, const Plan& plan) {
  return divide_up(problem.n, plan.block_rows()) * plan.cluster;
}

constexpr int kMostRingBytes = 192 * 1024;
constexpr int kRingBytesOfTwo = 64 * 1024;  // of each of two blocks on a multiprocessor

// Whether two blocks have room on a multiprocessor.
inline bool two_fit(const Problem& problem, const Plan& plan, const Device& device) {
  return layout_of(problem, plan).bytes <= device.shared_bytes / 2 - 1024;
}

// The way that a device has for a product, with warpgroups if they are wanted and possible.
inline Way way_of(const Problem& problem, const Device& device, bool wants_warpgroups = true) {
  if (wants_warpgroups && device.has_warpgroups && problem.may_have_warpgroups()) return Way::kWarpgroups;
  const bool is_boxed = problem.prepares() && device.has_clusters && problem.scaling != Scaling::kLines;
  return is_boxed ? Way::kBoxes : Way::kLanes;
}

// The same plan with a ring of weights. Of boxes it holds at most so many bytes. In a step a warp multiplies two boxes,
// unless few steps would fit then.
inline Plan with_ring(const Problem& problem, Plan plan, int bytes = kMostRingBytes) {
  if (!plan.boxed()) {
    plan.step_chunks = 1, plan.stages = stages_of(row_groups_of(problem.m), plan.row_tiles);
    return plan;
  }
  const int64_t chunks = divide_up(divide_up(problem.k, kChunk), plan.cluster);
  const auto steps = [&](int step_chunks) {
    return static_cast<int>(divide_up(chunks, int64_t{plan.depth_warps} * step_chunks));
  };
  const auto step_bytes = [&](int step_chunks) {
    Plan tried = plan;
    tried.step_chunks = step_chunks;
    return tried.step_bytes(row_groups_of(problem.m));
  };
  if (plan.step_chunks == 0) {
    const bool is_worth = steps(2) < steps(1) && std::min(3, steps(2)) * step_bytes(2) <= bytes;
    plan.step_chunks = is_worth ? 2 : 1;
  }
  if (plan.stages == 0) plan.stages = std::clamp(bytes / step_bytes(plan.step_chunks), 1, kMostStages);
  return plan;
}

// The same plan with phases: as few as fit in shared memory. Nothing if none fit.
inline std::optional<Plan> with_phases(const Problem& problem, Plan plan, const Device& device) {
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
inline std::optional<Plan> with_boxes(const Problem& problem, const Plan& plan, const Device& device) {
  if (blocks_of(problem, plan) > device.processors) {
    const auto found = with_phases(problem, with_ring(problem, plan, kRingBytesOfTwo), device);
    if (found && two_fit(problem, *found, device)) return found;
  }
  for (const int step_chunks : {0, 1}) {
    Plan tried = plan;
    tried.step_chunks = step_chunks;
    for (tried = with_ring(problem, tried); tried.stages > 0; --tried.stages) {
      const auto found = with_phases(problem, tried, device);
      if (found && (tried.stages > 1 || course_of(problem, tried).steps == 1 || plan.depth_warps == 1)) return found;
    }
  }
  return std::nullopt;
}

// A plan by its digits: stages, chunks of a step and two of the steps of a phase (0: chosen here), cluster, row_tiles,
// row_warps and two of depth_warps. 12204 is no cluster, two tiles for each warp, two warps along the rows of b, and
// four along k. One tile and four or eight warps along the rows of b are one or two warpgroups; nine stand for sixteen.
inline std::optional<Plan> plan_by_digits(const Problem& problem, const Device& device) {
  const int digits = problem.config;
  Plan plan{.row_tiles = digits / 1000 % 10,
            .row_warps = digits / 100 % 10,
            .depth_warps = digits % 100,
            .cluster = digits / 10'000 % 10,
            .phase_steps = digits / 100'000 % 100,
            .ahead = 0,
            .step_chunks = digits / 10'000'000 % 10,
            .stages = digits / 100'000'000,
            .way = Way::kLanes};
  plan.way = way_of(problem, device, plan.row_tiles == 1 && plan.row_warps >= 4);
  if (plan.row_warps == 9) plan.row_warps = 16;
  const int groups = row_groups_of(problem.m);
  const auto is_power = [](int number, int most) {
    return number > 0 && number <= most && (number & (number - 1)) == 0;
  };
  const bool has_tiles = plan.way == Way::kWarpgroups || plan.row_tiles == 2 || (groups <= 2 && !problem.gated);
  const bool is_good = has_tiles && is_power(plan.row_tiles, 2) && is_power(plan.row_warps, 16) &&
                       plan.depth_warps > 0 && is_power(plan.cluster, kMostCluster) &&
                       (plan.boxed() ? plan.stages <= kMostStages : plan.stages == 0 && plan.step_chunks <= 1) &&
                       plan.block_rows() <= most_block_rows(problem, plan.way) &&
                       plan.threads() <= most_threads(groups, plan.way, problem.scaling);
  if (!is_good) return std::nullopt;
  plan = with_ring(problem, plan);
  if (plan.phase_steps == 0 || plan.boxed()) return with_phases(problem, plan, device);
  plan.ahead = static_cast<int>(divide_up(plan.stages, plan.phase_steps));
  if (layout_of(problem, plan).bytes > device.shared_bytes) return std::nullopt;
  return plan;
}

// Eight warps, in blocks that all run at once where n allows it: of 32 rows of b, or 64, or 128. From 5 rows of a on,
// copying them costs a block more than sharing k with another block does, so blocks are twice as large. A small matrix
// has a long k shared by more blocks. Fewer warps where shared memory is small.
inline std::optional<Plan> plan_of_lanes(const Problem& problem, const Device& device) {
  const int64_t chunks = divide_up(problem.k, kChunk);
  Plan plan{.row_tiles = 2, .row_warps = 1, .depth_warps = 8, .cluster = 1, .phase_steps = 1, .ahead = 1,
            .step_chunks = 0, .stages = 0, .way = Way::kLanes};
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
      if (const auto found = with_phases(problem, with_ring(problem, tried), device)) return found;
    }
  }
  return std::nullopt;
}

// With boxes. Eight warps for 32 rows of b, sixteen for 64 and eight for 128 were the fastest on an H200, in whole
// layers of 1.3B and of 8B. From 5 rows of a on, preparing them costs a block more: so twice as many warps do it, and
// where k is short, blocks of 64 rows share it. Where the rows of a do not fit, more blocks share k.
inline std::optional<Plan> plan_of_boxes(const Problem& problem, const Device& device) {
  const int64_t chunks = divide_up(problem.k, kChunk);
  const bool is_many = problem.m > 4;
  Plan plan{.row_tiles = 2, .row_warps = 1, .depth_warps = 8, .cluster = 1, .phase_steps = 1, .ahead = 1,
            .step_chunks = 0, .stages = 0, .way = Way::kBoxes};
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

// Rings of warpgroups in bytes. Beside a small one that of the next kernel has room, whose first weights come while
// this one still runs.
constexpr int kThirdRing = 72 * 1024, kSmallRing = 112 * 1024, kLargeRing = 152 * 1024, kWholeRing = 168 * 1024;
constexpr int kRowsOfLargeCluster = 16;  // of a: with more, sending their sums takes longer than reading k
constexpr int kGroupsOfMany = 8;         // rows of a, eight by eight: every block reads them, so blocks are large

// With warpgroups. By searches on an H200 through the plans of whole layers of three models, with 1 to 64 rows: where n
// and k leave half of the multiprocessors idle, blocks share k. Where few blocks have a short k, they ask for all of it
// at once. Else two warpgroups share k, and two blocks a multiprocessor. Where still more blocks would not all run at
// once, they are of 128 rows of b, or with many rows of a, of 256. With 5 to 8 rows of a, the largest clusters were
// faster where blocks share k, and boxes of four chunks where they do not.
inline std::optional<Plan> plan_of_warpgroups(const Problem& problem, const Device& device) {
  const int64_t chunks = divide_up(problem.k, kChunk);
  const int groups = row_groups_of(problem.m);
  Plan plan{.row_tiles = 1, .row_warps = 4, .depth_warps = 2, .cluster = 1, .phase_steps = 1, .ahead = 1,
            .step_chunks = 2, .stages = 0, .way = Way::kWarpgroups};
  const auto blocks = [&] { return blocks_of(problem, plan); };
  const bool is_few = problem.m <= kRowsOfLargeCluster, is_5_to_8 = problem.m > 4 && groups == 1;
  const bool is_many = groups >= kGroupsOfMany;
  const int most_blocks = is_few ? kMostCluster : 2, fewest_chunks = is_few ? 32 : is_many ? 64 : 16;
  while (plan.cluster < most_blocks && 2 * blocks() <= device.processors && chunks >= fewest_chunks * plan.cluster) {
    plan.cluster *= 2;
  }
  const int64_t own_chunks = divide_up(chunks, plan.cluster);
  const bool leaves_room = 5 * blocks() <= 4 * device.processors;
  const int64_t all_bytes = own_chunks * (plan.block_rows() + groups * 8) * kChunk;
  // Not all clusters of four or more find room at once, unless a multiprocessor has room for two of their blocks.
  bool wants_two = plan.cluster > 2 && !leaves_room;
  int bytes = is_many ? kMostRingBytes : own_chunks <= 16 && !leaves_room ? kSmallRing : kLargeRing;
  if (blocks() > device.processors && blocks() <= 2 * device.processors) {
    wants_two = !is_many;
    if (is_many) plan.row_warps = 8;
  } else if (blocks() > device.processors && is_many && most_block_rows(problem, plan.way) == kMostBlockRows) {
    plan.row_warps = 16, plan.depth_warps = plan.step_chunks = 1;
  } else if (blocks() > device.processors) {
    plan.row_warps = 8, bytes = kThirdRing;  // of what runs on a multiprocessor at once
    if (plan.step_bytes(groups) > bytes) plan.depth_warps = plan.step_chunks = 1;
  } else if (is_5_to_8 && plan.cluster > 2) {
    plan.cluster = kMostCluster, plan.depth_warps = 1;
    bytes = kRingBytesOfTwo;
  } else if (is_5_to_8 && plan.cluster == 1 && !leaves_room) {
    plan.step_chunks = 4, bytes = kLargeRing;
  } else if (leaves_room && all_bytes <= kWholeRing) {
    plan.depth_warps = own_chunks >= 4 ? 4 : own_chunks >= 2 ? 2 : 1;
    plan.step_chunks = static_cast<int>(std::min<int64_t>(4, divide_up(own_chunks, plan.depth_warps)));
    bytes = kWholeRing;
  }
  for (; plan.depth_warps > 0; plan.depth_warps /= 2) {
    if (plan.threads() > most_threads(groups, plan.way, problem.scaling)) continue;
    for (const bool needs_two : {wants_two, false}) {
      for (Plan tried = with_ring(problem, plan, bytes); tried.stages > 0; --tried.stages) {
        const auto found = with_phases(problem, tried, device);
        if (found && (!needs_two || two_fit(problem, *found, device))) return found;
      }
    }
  }
  return std::nullopt;
}

inline std::optional<Plan> plan_of(const Problem& problem, const Device& device) {
  if (problem.config != 0) return plan_by_digits(problem, device);
  switch (way_of(problem, device)) {
    case Way::kBoxes: return plan_of_boxes(problem, device);
    case Way::kWarpgroups: return plan_of_warpgroups(problem, device);
    default: return plan_of_lanes(problem, device);
  }
}

}  // namespace jax_fp8::few_rows_gemm
