// Two kernels for the loss, one block for each row. rows_kernel keeps the row in shared memory. any_kernel reads
// element by element, for a gradient that is aligned differently from the logits. cross_entropy_ahead.cuh has a third
// kernel, for rows that do not fit the shared memory of one block.
//
// Each thread computes an online softmax of its elements while they are in registers: it adds up exp(x - largest), and
// rescales the sum whenever a batch of loads brings a larger x. Two reductions over the block then give the row's
// maximum and sum, and each thread turns the elements that it keeps in shared memory into their gradient. The gradient
// may overwrite the logits. So the block reads the whole row before any thread writes, and elements that did not fit
// into shared memory are read again by the same thread that overwrites them.
//
// Vectors begin at multiples of 16 bytes. With an odd vocabulary that is at another column in every row. Up to 14
// elements at the two ends of a row are in no vector; as many threads take one each.
//
// Two blocks share a multiprocessor, so that one loads while the other computes and stores:
//
//     16-bit, vocab = 50,304: 2 x 100,608 bytes of logits; 2 x 512 threads with 128 bytes of loads in flight each,
//     128 KB together. An element costs some 16 instructions and two exponentials: half of the time in which memory
//     delivers it and takes it back.
//
// For 16-bit logits, exp has the relative error 2**-22 + |logit - largest| 2**-23, far less than the rounding of the
// gradient to 16 bits.
#pragma once

#include <cstdint>

#include "exponential.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace jax_fp8::cross_entropy {

constexpr int kThreads = 512;
constexpr int kBlocks = 2;  // on a multiprocessor
constexpr int64_t kMaxVectorizedVocab = 1 << 24;

// The vectors that a thread loads before it needs the first: 128 bytes.
template <typename T>
constexpr int kDepth = 16 / sizeof(T);

template <typename T>
struct Rows {
  const T* logits;  // read with ordinary loads, not the read-only cache: the gradient may overwrite them
  const int32_t* labels;
  const float* shares;
  float z_loss;
  T* gradient;
  float* loss;
  float* lse;
  int64_t vocab;
};

template <typename T>
__device__ inline float exponential(float x) {
  return power_of_2<T>(__fmul_rn(kLog2E, x));
}

// The online softmax of some elements: their maximum, and sum exp(x - largest). `largest` stays finite, so that even
// infinity - largest is no NaN.
struct alignas(8) Measured {
  static constexpr float kLimit = 0x1.fffffep127f;
  float largest, sum;

  static __device__ Measured nothing() { return {-kLimit, 0.0f}; }

  template <typename T>
  __device__ void raise(float wanted) {
    const float raised = fminf(fmaxf(wanted, largest), kLimit);
    sum = __fmul_rn(sum, exponential<T>(__fsub_rn(largest, raised)));
    largest = raised;
  }

  template <typename T>
  __device__ void add(float x) {
    sum = __fadd_rn(sum, exponential<T>(__fsub_rn(x, largest)));
  }

  // Adds the vectors that begin before `end`. The first begins at `start`, and the others follow `stride` apart.
  template <typename T>
  __device__ void add_batch(const Vector<T> (&vectors)[kDepth<T>], int start, int stride, int end) {
    float most = largest;
#pragma unroll
    for (int i = 0; i < kDepth<T>; ++i) {
      if (start + i * stride >= end) break;
      float x[kVectorWidth];
      unpack(vectors[i], x);
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) most = fmaxf(most, x[j]);
    }
    raise<T>(most);
#pragma unroll
    for (int i = 0; i < kDepth<T>; ++i) {
      if (start + i * stride >= end) break;
      float x[kVectorWidth];
      unpack(vectors[i], x);
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) add<T>(x[j]);
    }
  }

  template <typename T>
  __device__ void add_one(float x) {
    raise<T>(x);
    add<T>(x);
  }
};

struct Scratch {
  float maxima[kWarp];
  float sums[kWarp][1];
};

// Merges the measurements of all threads of the block; every thread gets the result. fmaxf drops a NaN from the
// maximum, but the sum keeps it.
template <typename T>
__device__ inline Measured merge(Measured measured, Scratch& scratch) {
  measured.raise<T>(block_max(measured.largest, scratch.maxima));
  float sum[1] = {measured.sum};
  block_sums(sum, scratch.sums);
  measured.sum = sum[0];
  return measured;
}

// A row's label and share. The share becomes NaN if the label is no token.
struct Label {
  int label;
  bool is_token;
  float share;

  template <typename T>
  __device__ Label(const Rows<T>& rows, int label_, float share_)
      : label(label_), is_token(label >= 0 && label < rows.vocab) {
    share = is_token ? share_ : __uint_as_float(0x7FFFFFFFu);
  }

  template <typename T>
  __device__ Label(const Rows<T>& rows, int64_t row)
      : Label(rows, __ldg(rows.labels + row), __ldg(rows.shares + row)) {}

  // The label's logit. Read it before the block's last barrier: afterwards the gradient may overwrite it.
  template <typename T>
  __device__ float chosen(const T* logits) const {
    return is_token ? to_float(logits[label]) : 0.0f;
  }
};

// The loss and the gradient of a row. They subtract the largest logit, not lse: where lse is large, its rounding error
// would be too.
struct Result {
  float largest, log_sum, lse;
  float factor;  // share (1 + 2 z_loss lse) / sum

  __device__ Result(Measured row, float z_loss, float share) {
    largest = row.largest;
    log_sum = logf(row.sum);
    lse = __fadd_rn(largest, log_sum);
    factor = __fmul_rn(share, __fdiv_rn(__fmaf_rn(2.0f * z_loss, lse, 1.0f), row.sum));
  }

  // share (1 + 2 z_loss lse) softmax
  template <typename T>
  __device__ float slope(float x) const {
    return __fmul_rn(exponential<T>(__fsub_rn(x, largest)), factor);
  }

  // The gradient of the element in column `col`.
  template <typename T>
  __device__ T element(float x, int64_t col, const Label& label) const {
    return from_float<T>(__fsub_rn(slope<T>(x), col == label.label ? label.share : 0.0f));
  }

  // The gradient of the vector that begins at column `col`.
  template <typename T>
  __device__ Vector<T> of_vector(Vector<T> vector, int col, const Label& label) const {
    float x[kVectorWidth];
    unpack(vector, x);
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) x[j] = slope<T>(x[j]);
    const unsigned place = static_cast<unsigned>(label.label) - static_cast<unsigned>(col);
    if (place < kVectorWidth) {
#pragma unroll
      for (unsigned j = 0; j < kVectorWidth; ++j) x[j] = __fsub_rn(x[j], j == place ? label.share : 0.0f);
    }
    pack(x, vector);
    return vector;
  }

  template <typename T>
  __device__ void write(const Rows<T>& rows, int64_t row, float chosen, float share) const {
    const float loss = __fadd_rn(__fsub_rn(largest, chosen), log_sum);
    rows.loss[row] = __fmul_rn(share, __fmaf_rn(rows.z_loss, __fmul_rn(lse, lse), loss));
    rows.lse[row] = lse;
  }
};

// ---- rows in vectors ------------------------------------------------------------------------------------------------

// The part of a row that one of 2**log2_blocks blocks has, and the element in no vector that a thread of block 0 has.
struct Part {
  int begin, end;  // columns of the block's vectors
  int lone;        // the column of the thread's element in no vector; -1: none

  template <typename T>
  __device__ Part(const T* logits, int vocab, int block, int log2_blocks) {
    constexpr int kAligned = 16 / sizeof(T);
    const auto after = static_cast<int>(reinterpret_cast<uintptr_t>(logits) % 16 / sizeof(T));
    const int first = min(vocab, (kAligned - after) % kAligned);
    const int vectors = (vocab - first) / kVectorWidth;
    begin = first + (vectors * block >> log2_blocks) * kVectorWidth;
    end = first + (vectors * (block + 1) >> log2_blocks) * kVectorWidth;
    const int thread = static_cast<int>(threadIdx.x), last = first + vectors * kVectorWidth;
    lone = thread < first ? thread : last + thread - first;
    if (block != 0 || lone >= vocab) lone = -1;
  }
};

// Measures a thread's vectors, which are kThreads vectors apart. Copies those among the first `held` elements of the
// part to `kept`, in shared memory.
template <typename T>
__device__ inline Measured measure(const T* logits, const Part& part, T* kept, int held) {
  constexpr int kStride = kThreads * kVectorWidth;
  Measured measured = Measured::nothing();
  for (int start = part.begin + static_cast<int>(threadIdx.x) * kVectorWidth; start < part.end;
       start += kStride * kDepth<T>) {
    Vector<T> loaded[kDepth<T>];
#pragma unroll
    for (int i = 0; i < kDepth<T>; ++i) {
      if (start + i * kStride < part.end) loaded[i] = read_vector(logits + start + i * kStride);
    }
    measured.add_batch(loaded, start, kStride, part.end);
    // These stores come after the sums: otherwise the compiler merges them with the loop of loads, and each store waits
    // for its load.
#pragma unroll
    for (int i = 0; i < kDepth<T>; ++i) {
      const int col = start + i * kStride;
      if (col < part.end && col - part.begin < held) write_vector(kept + col - part.begin, loaded[i]);
    }
  }
  return measured;
}

// Dynamic shared memory: the first `held` elements of a row's vectors, where `held` is a multiple of a vector.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks) rows_kernel(Rows<T> rows, int held) {
  extern __shared__ uint4 shared[];
  __shared__ Scratch scratch;
  T* const kept = reinterpret_cast<T*>(shared);
  const int64_t row = blockIdx.x;
  const T* const logits = rows.logits + row * rows.vocab;
  T* const gradient = rows.gradient + row * rows.vocab;
  const Part part(logits, static_cast<int>(rows.vocab), 0, 0);
  const Label label(rows, row);
  const float lone = part.lone >= 0 ? to_float(logits[part.lone]) : 0.0f;
  Measured measured = measure(logits, part, kept, held);
  if (part.lone >= 0) measured.add_one<T>(lone);
  const float chosen = threadIdx.x == 0 ? label.chosen(logits) : 0.0f;
  const Result result(merge<T>(measured, scratch), rows.z_loss, label.share);
  if (threadIdx.x == 0) result.write(rows, row, chosen, label.share);

  if (part.lone >= 0) gradient[part.lone] = result.element<T>(lone, part.lone, label);
#pragma unroll 2
  for (int col = part.begin + static_cast<int>(threadIdx.x) * kVectorWidth; col < part.end;
       col += kThreads * kVectorWidth) {
    const int at = col - part.begin;
    const Vector<T> vector = at < held ? read_vector(kept + at) : read_vector(logits + col);
    store_vector(gradient + col, result.of_vector(vector, col, label));
  }
}

// ---- one element at a time ------------------------------------------------------------------------------------------

template <typename T>
__global__ void __launch_bounds__(kThreads) any_kernel(Rows<T> rows) {
  __shared__ Scratch scratch;
  const int64_t row = blockIdx.x;
  const T* const logits = rows.logits + row * rows.vocab;
  T* const gradient = rows.gradient + row * rows.vocab;
  const Label label(rows, row);
  float largest = -Measured::kLimit;
  for (int64_t col = threadIdx.x; col < rows.vocab; col += kThreads) largest = fmaxf(largest, to_float(logits[col]));
  Measured measured = Measured::nothing();
  measured.raise<T>(largest);
  for (int64_t col = threadIdx.x; col < rows.vocab; col += kThreads) measured.add<T>(to_float(logits[col]));
  const float chosen = threadIdx.x == 0 ? label.chosen(logits) : 0.0f;
  const Result result(merge<T>(measured, scratch), rows.z_loss, label.share);
  if (threadIdx.x == 0) result.write(rows, row, chosen, label.share);

  for (int64_t col = threadIdx.x; col < rows.vocab; col += kThreads) {
    gradient[col] = result.element<T>(to_float(logits[col]), col, label);
  }
}

}  // namespace jax_fp8::cross_entropy
