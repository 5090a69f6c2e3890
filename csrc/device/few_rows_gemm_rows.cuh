// What happens to the rows of a before a product by warpgroups: norm and cast, in a kernel of its own. The GEMM begins
// while this one runs, and has its first weights on their way by the time the rows are there.
//
// A row that is normalized has a block, and is in its registers. Others are cast in pieces.
//
//     [8, 2048]: a load of 16 bytes for each thread, one sum over the block or two, and a store of 8 bytes
#pragma once

#include <cstdint>

#include "few_rows_gemm_plan.cuh"
#include "fp8.cuh"
#include "norm.cuh"
#include "programmatic.cuh"
#include "reduce.cuh"
#include "vector.cuh"
#include "words.cuh"

namespace jax_fp8::few_rows_gemm {

constexpr int kPrepareThreads = 256;
constexpr int kPieceColumns = kPrepareThreads * kVectorWidth;  // a vector for each thread
constexpr int kMostPieces = kMostNormalizedDepth / kPieceColumns;

struct RawRows {
  const BFloat16* x;                    // [m, k]
  const float* scale;                   // of the cast
  const float *norm_scale, *norm_bias;  // [k]; the first is null without a norm, the second with RMSNorm
  float epsilon;
  int k, blocks_of_row;
  uint8_t* rows;  // [m, k] in E4M3
};

// A block has kPieces of a row.
template <int kPieces>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const RawRows raw) {
  __shared__ float scratch[2][kWarp][1];
  let_next_kernel_begin();
  const int row = static_cast<int>(blockIdx.x) / raw.blocks_of_row;
  const int first = (static_cast<int>(blockIdx.x) - row * raw.blocks_of_row) * kPieces;
  const bool normalizes = raw.norm_scale != nullptr, centres = raw.norm_bias != nullptr;
  const auto column_of = [&](int piece) {
    return (first + piece) * kPieceColumns + static_cast<int>(threadIdx.x) * kVectorWidth;
  };
  Vector<float> norm_scale[kPieces], norm_bias[kPieces];
  if (normalizes) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (column_of(piece) >= raw.k) break;
      norm_scale[piece] = load_vector(raw.norm_scale + column_of(piece));
      if (centres) norm_bias[piece] = load_vector(raw.norm_bias + column_of(piece));
    }
  }
  wait_for_kernels_before();
  const float multiplier = multiplier_of(__ldcg(raw.scale));
  Vector<BFloat16> vectors[kPieces];
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if (column_of(piece) >= raw.k) break;
    load_words(raw.x + int64_t{row} * raw.k + column_of(piece), 0, sizeof(vectors[piece]), vectors[piece].words);
  }
  float mean = 0.0f, rstd = 1.0f, x[kPieces][kVectorWidth];
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if (column_of(piece) < raw.k) unpack(vectors[piece], x[piece]);
  }
  // The sum over the row of what `add` adds for each element.
  const auto sum_over = [&](float (&partial)[kWarp][1], auto add) {
    float sums[1] = {0.0f};
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (column_of(piece) >= raw.k) break;
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) sums[0] = add(sums[0], x[piece][j]);
    }
    block_sums(sums, partial);
    return sums[0];
  };
  if (centres) {
    mean = norm::mean_of(sum_over(scratch[0], [](float sum, float one) { return __fadd_rn(sum, one); }), raw.k);
  }
  if (normalizes) {
    const auto add_square = [&](float sum, float one) { return norm::add_square(sum, __fsub_rn(one, mean)); };
    rstd = norm::rstd_of(sum_over(scratch[1], add_square), raw.k, raw.epsilon);
  }
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    if (column_of(piece) >= raw.k) break;
    if (normalizes) {
      float scale[kVectorWidth], bias[kVectorWidth];
      unpack(norm_scale[piece], scale);
      if (centres) unpack(norm_bias[piece], bias);
#pragma unroll
      for (int j = 0; j < kVectorWidth; ++j) {
        x[piece][j] = norm::normalized(x[piece][j], mean, rstd, scale[j], centres ? bias[j] : norm::kNoBias);
      }
      round_all<BFloat16>(x[piece]);
    }
    const uint2 bytes = {quantize_four<Fp8Type::kE4M3>(x[piece], multiplier),
                         quantize_four<Fp8Type::kE4M3>(x[piece] + 4, multiplier)};
    *reinterpret_cast<uint2*>(raw.rows + int64_t{row} * raw.k + column_of(piece)) = bytes;
  }
}

}  // namespace jax_fp8::few_rows_gemm
