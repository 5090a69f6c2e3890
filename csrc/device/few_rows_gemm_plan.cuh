// How a product of few rows is divided among blocks, warps and steps. The host chooses a plan, and the kernel follows
// it.
#pragma once

#include <cstdint>

#include "../sizes.h"

namespace jax_fp8::few_rows_gemm {

constexpr int kMostRows = 64;          // of a
constexpr int kMostDepth = 1 << 30;    // k, so that an int holds the end of a phase behind it
constexpr int kChunk = 128;            // elements along k that a warp multiplies at once, and a line of scales
constexpr int kWarpRows = 16;          // of b in one product of the tensor cores
constexpr int kSquareRows = 128;       // of b, in a square of scales
constexpr int kMostBlockRows = 256;    // of b, of which a box can have no more; with squares those of one
constexpr int kMostCluster = 8;        // blocks, the portable size
constexpr int kLaneBytes = 16;         // that a lane copies at once
constexpr int kBoxAlignment = 1024;    // of a box in shared memory: the swizzle takes bits of its address
constexpr int kFloatsBetweenRows = 4;  // of sums in shared memory, against bank conflicts

enum class Scaling {
  kOne,      // one scale for a and one for b
  kLines,    // a has one for each 1 x 128, and b one for each 128 x 128
  kSquares,  // a has one scale, and b one for each 128 x 128
};

// What a block does itself with the rows of a before the product: for few rows that costs less than a kernel before.
struct Preparation {
  bool normalizes = false;  // the rows, over all of k
  bool casts = false;       // from bfloat16 to E4M3
  float epsilon = 0;        // of the norm
};

constexpr int kMostPreparedRows = 8;         // by each block for itself
constexpr int kMostNormalizedDepth = 16384;  // k, of rows that a kernel of their own normalizes
constexpr int kMostWarps = 16;
constexpr int kMostStages = 4;  // of weights in boxes

// The batches of weights that a lane has under way if it copies them itself, each of 64 bytes for every tile of 16
// rows. For many rows of a, activations need most of the shared memory.
constexpr int stages_of(int row_groups, int row_tiles) { return row_groups >= 4 ? 3 : 8 / row_tiles; }

// How weights come to the tensor cores. Boxes need compute capability 9.0 or newer.
enum class Way {
  kLanes,      // each lane copies what it multiplies
  kBoxes,      // in boxes, by rows of a that are prepared: few_rows_gemm_boxes.cuh
  kWarpgroups  // in boxes, by boxes of a, which are E4M3; on 9.0 alone: few_rows_gemm_warpgroups.cuh
};

// Whether bias and c come to shared memory before they are needed. Else they would need too much of it.
constexpr bool fetches_addends(Way way, int row_groups) { return way == Way::kWarpgroups || row_groups == 1; }

// Rows of a, eight by eight.
constexpr int row_groups_of(int m) { return m <= 8 ? 1 : m <= 16 ? 2 : m <= 32 ? 4 : 8; }

// The most threads of a block, which decide how many registers each may use: some 100, or 200.
constexpr int most_threads(int row_groups, Way way, Scaling scaling) {
  const int most_groups = way != Way::kWarpgroups ? 2 : scaling == Scaling::kOne ? 8 : 4;  // with fewer registers
  return row_groups <= most_groups ? 512 : 256;
}

constexpr int log2_of(int power_of_two) { return power_of_two == 1 ? 0 : 1 + log2_of(power_of_two / 2); }

struct Plan {
  int row_tiles;    // tiles of 16 rows of b that a warp multiplies: 1 or 2
  int row_warps;    // warps side by side along the rows of b
  int depth_warps;  // warps, or warpgroups, that take turns at the chunks along k
  int cluster;      // blocks that share the same rows of b, each with a part of k
  int phase_steps;  // steps whose activations are copied together
  int ahead;        // phases that are copied before they are needed
  int step_chunks;  // neighbours along k that a warp multiplies in one step
  int stages;       // batches of weights of a warp that are under way, each of one step
  Way way;

  constexpr int block_rows() const { return row_warps * row_tiles * kWarpRows; }
  constexpr int warps() const { return row_warps * depth_warps; }
  constexpr int threads() const { return warps() * 32; }
  constexpr bool boxed() const { return way != Way::kLanes; }

  // Of the weights of all warps in one step, and of the rows of a beside them, of which there are at most so many.
  constexpr int step_bytes(int row_groups) const {
    const int rows = block_rows() + (way == Way::kWarpgroups ? row_groups * 8 : 0);
    return depth_warps * step_chunks * rows * kChunk;
  }
};

// A divisor of small numbers, which a multiplication divides by: a division takes more than a hundred cycles, at the
// start of the kernel all in a row.
struct Divisor {
  int divisor;
  uint32_t inverse;  // 2**32 / divisor, rounded up; 0 of the divisor 1

  explicit Divisor(int divisor)
      : divisor(divisor),
        inverse(divisor == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + divisor - 1) / divisor)) {}
};

// What follows from a plan, for a kernel that has no functions of the host.
struct Course {
  bool prepares;              // the rows of a
  int parts, d_columns;       // of a result: a sum, or with gates two; so d has half as many columns as b has rows
  int block_rows, box_rows;   // of b, and of a in a box
  bool has_chunk_boxes;       // whether a box of warpgroups has all chunks of a step; else one
  int log2_fours;             // of neighbours among them
  int all_chunks;             // along k
  int chunks, steps, phases;  // of one block
  int phase_slots, stages;    // that shared memory holds, of activations and of weights
  int warps, threads;         // that multiply
  int log2_cluster;
  Divisor depth_warps;        // of the warps of a block
  Divisor phase_vectors;      // 16 bytes of a row of activations in a phase
  Divisor raw_vectors;        // 16 bytes of a row of bfloat16 that is prepared, of this block's part
  int sharing;                // warps that prepare a row together
  Divisor by_sharing;

  Course(const Plan& plan, const Preparation& preparation, bool gated, int m, int n, int64_t k, int element_bytes)
      : prepares(preparation.normalizes || preparation.casts),
        parts(gated ? 2 : 1),
        d_columns(n / parts),
        block_rows(plan.block_rows()),
        box_rows(row_groups_of(m) * 8),
        has_chunk_boxes(plan.step_chunks > 1 && k % kChunk == 0),
        log2_fours(log2_of(plan.block_rows() / 4)),
        all_chunks(static_cast<int>(divide_up(k, kChunk))),
        chunks(static_cast<int>(divide_up(all_chunks, plan.cluster))),
        steps(static_cast<int>(divide_up(chunks, plan.depth_warps * plan.step_chunks))),
        phases(static_cast<int>(divide_up(steps, plan.phase_steps))),
        phase_slots(phases <= plan.ahead ? phases : plan.ahead + 1),
        stages(steps < plan.stages ? steps : plan.stages),
        warps(plan.warps()), threads(plan.threads()), log2_cluster(log2_of(plan.cluster)),
        depth_warps(plan.depth_warps),
        phase_vectors(plan.phase_steps * plan.depth_warps * plan.step_chunks * kChunk * element_bytes / 16),
        raw_vectors(static_cast<int>(preparation.normalizes ? k : int64_t{chunks} * kChunk) / 8),
        sharing(m > 0 && plan.warps() > m ? plan.warps() / m : 1),
        by_sharing(sharing) {}
};

// Shared memory, in bytes from its start. After the products, the sums of the warps take the place of weights and
// activations. What other blocks send has a place of its own, since they may be ahead.
struct Layout {
  int phase_row;      // from one row of activations to the next. With boxes, they lie where they were raw
  int phase_scales;   // where the scales of a phase begin
  int phase;          // from one phase to the next
  int ring;           // where the weights begin
  int stage;          // from one batch of weights to the next
  int raw;            // where rows of a begin that are prepared, as they are in memory
  int raw_row;        // from one of them to the next
  int partial;        // where sums of the warps over their parts of a row begin
  int norm;           // where scale and bias of a norm begin, of this block's part of k
  int sums_row;       // from one row of sums to the next
  int received;       // where sums from other blocks begin
  int received_part;  // of one block
  int addends;        // where bias and c begin, of the block's columns
  int bytes;          // of all

  Layout(const Plan& plan, const Course& course, const Preparation& preparation, Scaling scaling, int m, int k,
         int row_groups, int element_bytes, int d_bytes) {
    const int chunks = plan.phase_steps * plan.depth_warps * plan.step_chunks;
    // A quarter of a warp reads two rows of activations. These begin 64 bytes apart, modulo all banks, where a row has
    // one byte for each element; with two bytes, a lane reads every second vector, and 16 bytes apart is right.
    phase_row = chunks * kChunk * element_bytes + (element_bytes == 1 ? 64 : 16);
    phase_scales = m * phase_row;
    phase = plan.boxed() ? 0 : phase_scales + (scaling == Scaling::kLines ? chunks * row_groups * 8 * 4 : 0);
    ring = phase * course.phase_slots;
    stage = plan.step_bytes(row_groups);
    raw = ring + stage * course.stages;
    const int columns = course.chunks * kChunk;
    raw_row = (preparation.normalizes ? k : preparation.casts ? columns : 0) * 2;
    if (plan.way == Way::kBoxes) {
      const int before = preparation.normalizes ? (plan.cluster - 1) * columns : 0;
      phase_row = raw_row = (before + course.steps * plan.depth_warps * plan.step_chunks * kChunk) * 2 + 64;
    }
    partial = raw + m * raw_row;
    norm = partial + (preparation.normalizes ? 2 * kMostWarps * 4 : 0);
    const int products = norm + (preparation.normalizes ? 2 * columns * 4 : 0);
    sums_row = (plan.block_rows() + kFloatsBetweenRows) * 4;
    const int sums = plan.depth_warps * row_groups * 8 * sums_row;
    received = products > sums ? products : sums;
    const int fours = m * plan.block_rows() / 4 / course.parts;
    received_part = static_cast<int>(divide_up(fours, plan.cluster)) * course.parts * 16;
    addends = received + static_cast<int>(round_up(plan.cluster > 1 ? plan.cluster * received_part : 0, 16));
    bytes = (plan.boxed() ? kBoxAlignment : 0) + addends +
            (fetches_addends(plan.way, row_groups) ? 2 * kMostBlockRows + m * plan.block_rows() * d_bytes : 0);
  }
};

}  // namespace jax_fp8::few_rows_gemm
