// The loss for rows that do not fit the shared memory of one block. A cluster of blocks shares each row, and prefetches
// the next row while it computes this one.
//
// The grid has as many clusters as can run at once, and they take turns at the rows. A block has two buffers for its
// part of a row. Each thread fetches, measures and overwrites its own vectors only, so no barrier guards a buffer: when
// a thread has stored its gradient of a row, it fetches the row after the next one.
//
// The cluster synchronizes once for each row: every warp sends its measurement to every block, and a barrier in shared
// memory counts the bytes. The cluster's own barrier would be slower: its release waits for all earlier stores of a
// thread, which are the gradient of the previous row.
//
//     16-bit, vocab = 128,256: clusters of 8, 3 blocks on a multiprocessor, two buffers of 32,064 bytes each. Of these
//     192 KB, at least 96 KB are in flight or have just arrived. A multiprocessor's share of 4.2 TB/s, times 1 us of
//     latency, is 32 KB. To read and to write the parts of three blocks takes memory 6.0 us. An element takes some 14
//     instructions and two exponentials, and a row 300 more instructions of each warp: at 1.8 GHz 3.9 us of issue slots
//     and 3.6 us of exponentials. While one block waits, the others use these.
#pragma once

#include <cstdint>

#include "async_copy.cuh"
#include "cluster.cuh"
#include "cross_entropy.cuh"
#include "own_slots.cuh"

namespace jax_fp8::cross_entropy {

constexpr int kAheadThreads = 256;
constexpr int kAheadWarps = kAheadThreads / kWarp;
constexpr int kAheadBlocks = 3;  // on a multiprocessor, which the registers must allow
constexpr int kMaxLog2Blocks = 3;
constexpr int kMaxParts = kAheadWarps << kMaxLog2Blocks;

// The measurements that a block receives from all warps of its cluster, and the barriers that say when they are
// complete. There are two of each, for even and odd rows: while a warp still waits for a row's measurements or reads
// them, other warps may already send those of the next row. They cannot send those of the row after, because before
// that they need what this warp sends for the next row.
struct Told {
  Measured parts[2][kMaxParts];
  Barrier complete[2];
};

// The rank of this block in its cluster of 2**log2_blocks blocks.
struct Member {
  int block, log2_blocks;

  // Merges the measurements of all threads of the cluster, always in the same order; every thread gets the result.
  // `round` counts the rows of this cluster.
  template <typename T>
  __device__ Measured merge(Measured measured, int round, Told& told) const {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const int count = kAheadWarps << log2_blocks;
    Measured* const parts = told.parts[round % 2];
    Barrier& complete = told.complete[round % 2];
    measured.raise<T>(warp_max(measured.largest));
    measured.sum = warp_sum(measured.sum);
    if (lane >> log2_blocks == 0) send(measured, &parts[block * kAheadWarps + warp], complete, lane);
    if (threadIdx.x == 0) arrive_and_expect(complete, count * static_cast<int>(sizeof(Measured)));
    wait(complete, round / 2 % 2);

    constexpr int kParts = kMaxParts / kWarp;
    Measured part[kParts], row = Measured::nothing();
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int at = lane + i * kWarp;
      part[i] = at < count ? parts[at] : Measured::nothing();
      row.largest = fmaxf(row.largest, part[i].largest);
    }
    row.largest = warp_max(row.largest);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      part[i].raise<T>(row.largest);
      row.sum = __fadd_rn(row.sum, part[i].sum);
    }
    row.sum = warp_sum(row.sum);
    return row;
  }
};

// The labels of the next 32 rows of a cluster, one in each lane. If all lanes loaded the same label, the compiler would
// put it into a uniform register and wait for the load at once.
struct Labels {
  int label = 0;
  float share = 0.0f;

  template <typename T>
  __device__ void load(const Rows<T>& rows, int64_t first_row, int64_t step, int64_t count) {
    const int64_t row = first_row + static_cast<int64_t>(threadIdx.x % kWarp) * step;
    if (row >= count) return;
    label = __ldg(rows.labels + row);
    share = __ldg(rows.shares + row);
  }

  template <typename T>
  __device__ Label of_lane(const Rows<T>& rows, int lane) const {
    return Label(rows, __shfl_sync(0xFFFFFFFFu, label, lane), __shfl_sync(0xFFFFFFFFu, share, lane));
  }
};

// A row that is being prefetched. The constructor starts the copies of this thread's vectors to `kept`, and loads its
// lone element to a register, which nobody reads before the row's turn.
template <typename T>
struct Coming {
  Part part;
  T lone;

  __device__ Coming(const Rows<T>& rows, int64_t row, const Member& member, T* kept)
      : part(rows.logits + row * rows.vocab, static_cast<int>(rows.vocab), member.block, member.log2_blocks), lone{} {
    constexpr int kPiece = 16 / sizeof(T);
    const T* const logits = rows.logits + row * rows.vocab;
    const T* from = logits + part.begin + first();
#pragma unroll 4
    for (int at = first(); at < size(); at += kStride, from += kStride) {
#pragma unroll
      for (int i = 0; i < kVectorWidth; i += kPiece) fetch(kept + at + i, from + i);
    }
    if (part.lone >= 0) lone = logits[part.lone];
  }

  // Offsets of a thread's vectors, relative to the begin of the part.
  static constexpr int kStride = kAheadThreads * kVectorWidth;
  static __device__ int first() { return static_cast<int>(threadIdx.x) * kVectorWidth; }
  __device__ int size() const { return part.end - part.begin; }

  // Whether this thread has the label's logit, and so writes the loss. For a label that is no token, the first thread
  // does.
  __device__ bool tells(const Label& label, const Member& member) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (!label.is_token) return member.block == 0 && thread == 0;
    const int at = label.label - part.begin;
    return part.lone == label.label || (at >= 0 && at < size() && at % kStride / kVectorWidth == thread);
  }

  // The label's logit; only for the thread that `tells`.
  __device__ float chosen(const Label& label, const T* kept) const {
    if (!label.is_token) return 0.0f;
    return to_float(part.lone == label.label ? lone : kept[label.label - part.begin]);
  }
};

template <typename T>
__device__ inline Measured measure(const Coming<T>& row, const T* kept) {
  Measured measured = Measured::nothing();
  constexpr int kStride = Coming<T>::kStride;
  const int size = row.size();
  for (int start = row.first(); start < size; start += kStride * kDepth<T>) {
    Vector<T> vectors[kDepth<T>];
#pragma unroll
    for (int i = 0; i < kDepth<T>; ++i) {
      if (start + i * kStride < size) vectors[i] = read_vector(kept + start + i * kStride);
    }
    measured.add_batch(vectors, start, kStride, size);
  }
  if (row.part.lone >= 0) measured.add_one<T>(to_float(row.lone));
  return measured;
}

template <typename T>
__device__ inline void overwrite(T* gradient, const Coming<T>& row, const T* kept, const Result& result,
                                 const Label& label) {
  const int begin = row.part.begin, lone = row.part.lone;
  if (lone >= 0) gradient[lone] = result.element<T>(to_float(row.lone), lone, label);
  T* to = gradient + begin + row.first();
#pragma unroll 4
  for (int at = row.first(); at < row.size(); at += row.kStride, to += row.kStride) {
    store_vector(to, result.of_vector(read_vector(kept + at), begin + at, label));
  }
}

// Clusters of 2**log2_blocks blocks. Dynamic shared memory: two buffers of `held` elements, the most that a block's
// part of a row can have.
template <typename T>
__global__ void __launch_bounds__(kAheadThreads, kAheadBlocks)
    ahead_kernel(Rows<T> rows, int64_t count, int log2_blocks, int held) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ uint4 shared[];
  __shared__ Told told;
  T* const buffers = reinterpret_cast<T*>(shared);
  const Member member = {static_cast<int>(blockIdx.x) & ((1 << log2_blocks) - 1), log2_blocks};
  const int64_t clusters = gridDim.x >> log2_blocks;
  int64_t row = blockIdx.x >> log2_blocks;
  Labels labels;
  if (threadIdx.x == 0) {
    start(told.complete[0], 1);
    start(told.complete[1], 1);
    publish_barriers();
  }
  arrive_at_cluster();
  Coming<T> next(rows, row, member, buffers);
  end_batch();
  wait_for_cluster();
  for (int round = 0; row < count; row += clusters, ++round) {
    if (round % kWarp == 0) labels.load(rows, row, clusters, count);
    const Coming<T> present = next;
    const T* const kept = buffers + round % 2 * held;
    if (row + clusters < count) next = Coming<T>(rows, row + clusters, member, buffers + (round + 1) % 2 * held);
    end_batch();
    wait_for_earlier_batches();
    const Measured measured = member.merge<T>(measure(present, kept), round, told);
    const Label label = labels.of_lane(rows, round % kWarp);
    const Result result(measured, rows.z_loss, label.share);
    if (present.tells(label, member)) result.write(rows, row, present.chosen(label, kept), label.share);
    overwrite(rows.gradient + row * rows.vocab, present, kept, result, label);
  }
#endif
}

}  // namespace jax_fp8::cross_entropy
