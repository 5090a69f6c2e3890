// What a block does with the rows of a before a product of few rows: norm and cast, which would else be a kernel of
// their own. While a block prepares, its first weights are under way.
//
// The rows are copied to shared memory before the weights, since behind them they would arrive late; and only as many
// weights follow as memory brings meanwhile, because a thread waits when it asks for more. Some warps share a row, each
// with a part of it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "few_rows_gemm_plan.cuh"
#include "few_rows_gemm_weights.cuh"
#include "fp8.cuh"
#include "mma.cuh"
#include "norm.cuh"
#include "own_slots.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace jax_fp8::few_rows_gemm {

constexpr int kWidePiece = 64;  // bytes

template <typename Wide>
class Preparer {
 public:
  __device__ Preparer(const Arguments& arguments, const Part& part, uint8_t* shared)
      : arguments_(arguments), shared_(shared), first_(part.first_chunk * kChunk),
        columns_(min(part.chunks * kChunk, arguments.problem.k - first_)), lane_(part.lane) {}

  // Starts the copies of what no kernel before has made.
  __device__ void fetch_parameters() const {
    if (!preparation().normalizes) return;
#pragma unroll 1
    for (int i = threadIdx.x * 4; i < columns_; i += arguments_.course.threads * 4) {
      fetch(norm_scale() + i, arguments_.operands.norm_scale + first_ + i);
      if (centres()) fetch(norm_bias() + i, arguments_.operands.norm_bias + first_ + i);
    }
  }

  // Starts the copies of the rows, which end a batch.
  __device__ void fetch_rows() {
    // Here and not where it is used: behind the weights it would arrive late.
    if (preparation().casts) scale_ = load_now(arguments_.operands.a_scale);
    const bool normalizes = preparation().normalizes;
    const int k = arguments_.problem.k, first = normalizes ? 0 : first_;
    const int vectors = (normalizes ? k : columns_) / kVectorWidth;
    const auto* const a = static_cast<const BFloat16*>(arguments_.operands.a) + first;
    const Divisor& all = arguments_.course.raw_vectors;
#pragma unroll 2
    for (int i = threadIdx.x; i < arguments_.problem.m * all.divisor; i += arguments_.course.threads) {
      const int row = quotient(i, all), vector = i - row * all.divisor;
      if (vector >= vectors) continue;
      fetch(raw(row) + vector * kVectorWidth, a + int64_t{row} * k + vector * kVectorWidth);
    }
    end_batch();
  }

  // Where the lane's first eight elements of a chunk lie in the first row, if rows are prepared in place. The other 24
  // follow, eight after each kWidePiece bytes.
  __device__ const uint8_t* elements(int chunk) const {
    return reinterpret_cast<const uint8_t*>(own(0) + chunk * kChunk) + lane_ % 4 * 16;
  }

  // To `target`, from which the products read rows of `row_bytes`; behind the end of k zeros. Without a target: in
  // place, and in Wide, which has all values of E4M3. All threads that multiply must call it, with a barrier before and
  // after.
  __device__ void make(uint8_t* target, int row_bytes) const {
    const Course& course = arguments_.course;
    const int warps = course.warps, rows = quotient(warps, course.by_sharing);
    const int own_row = quotient(static_cast<int>(threadIdx.x) / kWarp, course.by_sharing);
    const float multiplier = multiplier_of(scale_);
    const int all = course.steps * arguments_.plan.depth_warps * arguments_.plan.step_chunks * kChunk;
    for (int first = 0; first < arguments_.problem.m; first += rows) {
      const int row = first + own_row;
      const bool exists = own_row < rows && row < arguments_.problem.m;
      float mean = 0.0f, rstd = 1.0f;
      if (preparation().normalizes) measure(exists ? row : 0, mean, rstd);
      if (!exists) continue;
#pragma unroll 1
      for (int column = first_column(); column - lane_ * kVectorWidth < all; column += course.sharing * kStep) {
        float x[kVectorWidth] = {};
        if (column < columns_) prepare(row, column, mean, rstd, x);
        if (target == nullptr) {
          __syncwarp();  // all lanes have read what is written over
          if (column < all) write_wide(own(row) + wide_place(column), multiplier, x);
        } else if (column < all) {
          write(target + row * row_bytes, column, multiplier, x);
        }
      }
    }
  }

 private:
  static constexpr int kStep = kWarp * kVectorWidth;  // columns of a warp

  // The first columns of the lane, of the part of a row that its warp has.
  __device__ int first_column() const {
    const int own = remainder_of(static_cast<int>(threadIdx.x) / kWarp, arguments_.course.by_sharing);
    return (own * kWarp + lane_) * kVectorWidth;
  }

  __device__ const Preparation& preparation() const { return arguments_.problem.preparation; }
  __device__ bool centres() const { return arguments_.operands.norm_bias != nullptr; }

  __device__ BFloat16* raw(int row) const {
    return reinterpret_cast<BFloat16*>(shared_ + arguments_.layout.raw + row * arguments_.layout.raw_row);
  }
  // The block's part of a row.
  __device__ BFloat16* own(int row) const { return raw(row) + (preparation().normalizes ? first_ : 0); }
  __device__ float* norm_scale() const { return reinterpret_cast<float*>(shared_ + arguments_.layout.norm); }
  __device__ float* norm_bias() const { return norm_scale() + arguments_.course.chunks * kChunk; }

  __device__ void measure(int row, float& mean, float& rstd) const {
    const int k = arguments_.problem.k;
    auto* const partial = reinterpret_cast<float*>(shared_ + arguments_.layout.partial);
    if (centres()) {
      const auto add = [](float sum, float x) { return __fadd_rn(sum, x); };
      mean = norm::mean_of(sum_over(row, partial, add), k);
    }
    const auto add_square = [&](float sum, float x) { return norm::add_square(sum, __fsub_rn(x, mean)); };
    rstd = norm::rstd_of(sum_over(row, partial + kMostWarps, add_square), k, preparation().epsilon);
  }

  // The sum over a row of what `add` adds for each element. A lane has eight sums, so that none waits for another.
  template <typename Add>
  __device__ float sum_over(int row, float* partial, Add add) const {
    const Course& course = arguments_.course;
    float sums[kVectorWidth] = {};
#pragma unroll 2
    for (int column = first_column(); column < arguments_.problem.k; column += course.sharing * kStep) {
      float x[kVectorWidth];
      unpack(read_vector(raw(row) + column), x);
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) sums[j] = add(sums[j], x[j]);
    }
#pragma unroll
    for (int half = kVectorWidth / 2; half > 0; half /= 2) {
#pragma unroll
      for (int j = 0; j < half; ++j) sums[j] = __fadd_rn(sums[j], sums[j + half]);
    }
    const float of_warp = warp_sum(sums[0]);
    if (course.sharing == 1) return of_warp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    if (lane_ == 0) partial[warp] = of_warp;
    wait_for_products(arguments_);
    const int own = lane_ % kMostWarps, other = warp - remainder_of(warp, course.by_sharing) + own;
    return warp_sum<kMostWarps>(own < course.sharing && other < course.warps ? partial[other] : 0.0f);
  }

  // Eight elements of this block's part of k.
  __device__ void prepare(int row, int column, float mean, float rstd, float (&x)[kVectorWidth]) const {
    unpack(read_vector(own(row) + column), x);
    if (!preparation().normalizes) return;
    float scale[kVectorWidth], bias[kVectorWidth];
    unpack(read_vector(norm_scale() + column), scale);
    if (centres()) unpack(read_vector(norm_bias() + column), bias);
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) {
      x[j] = norm::normalized(x[j], mean, rstd, scale[j], centres() ? bias[j] : norm::kNoBias);
    }
    round_all<BFloat16>(x);
  }

  // Where eight elements of a chunk are that a lane multiplies first, second, ...: so that four lanes read 64 bytes.
  __device__ static int wide_place(int column) {
    const int eight = column % kChunk / kVectorWidth;
    return column / kChunk * kChunk + (eight % 4 * 4 + eight / 4) * kVectorWidth;
  }

  __device__ static void write_wide(BFloat16* target, float multiplier, const float (&x)[kVectorWidth]) {
    if constexpr (std::is_same_v<Wide, Float16>) {
      uint32_t words[4];
      widen(quantize_four<Fp8Type::kE4M3>(x, multiplier), words[0], words[1], Float16{});
      widen(quantize_four<Fp8Type::kE4M3>(x + 4, multiplier), words[2], words[3], Float16{});
      *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      Vector<BFloat16> packed;
      pack(x, packed, 0);
      write_vector(target, packed);
    }
  }

  __device__ static void write(uint8_t* row, int column, float multiplier, const float (&x)[kVectorWidth]) {
    if constexpr (std::is_same_v<Wide, Float16>) {
      const uint2 bytes = {quantize_four<Fp8Type::kE4M3>(x, multiplier),
                           quantize_four<Fp8Type::kE4M3>(x + 4, multiplier)};
      *reinterpret_cast<uint2*>(row + column) = bytes;
    } else {
      Vector<BFloat16> packed;
      pack(x, packed, 0);
      write_vector(reinterpret_cast<BFloat16*>(row) + column, packed);
    }
  }

  const Arguments& arguments_;
  uint8_t* const shared_;
  const int first_, columns_, lane_;  // the block's part of k
  float scale_ = 1.0f;
};

}  // namespace jax_fp8::few_rows_gemm
