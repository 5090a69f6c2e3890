// The epilogue of device/grouped_gemm.cuh: multiplies the sums by a factor, adds bias and c, rounds, and copies them to
// the result by way of shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../grouped_gemm.h"
#include "async_copy.cuh"
#include "grouped_gemm_shared.cuh"
#include "grouped_gemm_tiles.cuh"
#include "vector.cuh"
#include "warpgroup.cuh"

namespace jax_fp8::grouped_gemm {

// A barrier of the 128 threads of one warpgroup. Hardware barrier 0 is that of __syncthreads.
__device__ inline void meet_in(int warpgroup) { 
  asm volatile("bar.sync %0, %1;" ::"r"(warpgroup + 1), "n"(128) : "memory");
}

// The dtype of the bias: bfloat16 for a float32 result, as for cuBLASLt; otherwise that of the result.
template <typename D>
using BiasType = std::conditional_t<std::is_same_v<D, float>, BFloat16, D>;

template <typename T>
__device__ inline float2 unpack_two(uint32_t bits) {
  float pair[2];
  unpack(bits, pair, T{});
  return {pair[0], pair[1]};
}

// How many columns of a result make a box, 128 bytes wide, and how many columns are written together, in kBoxes boxes.
template <typename D>
constexpr int kBoxColumns = kSwizzleBytes / sizeof(D);
template <typename D>
constexpr int kColumnsTogether = kBoxColumns<D> * kBoxes;

// How many matrices of 8 x 8 elements, side by side, a warp writes at once.
template <typename D>
constexpr int kMatrices = sizeof(D) == 2 ? 2 : 1;

// A warpgroup's boxes in shared memory: c arrives there, the result replaces it, and a copy stores the result.
template <typename D>
class Results {
 public:
  __device__ Results(const Arguments& arguments, Shared& shared, int warpgroup)
      : arguments_(arguments), boxes_(shared.results[warpgroup]), bias_(shared.bias[warpgroup]),
        c_arrived_(shared.c_arrived[warpgroup]), warpgroup_(warpgroup), is_first_(threadIdx.x % 128 == 0) {}

  // Starts the loads of bias and c before the sums of the tile are complete.
  __device__ void begin(const GemmTile& tile) {
    const int column = tile.column + threadIdx.x % 128 * 2;
    if (arguments_.bias != nullptr && column < arguments_.shape.n) {
      bias_[threadIdx.x % 128] = __ldg(static_cast<const uint32_t*>(arguments_.bias) + column / 2);
    }
    load_c(tile, 0);
  }

  __device__ void write(const GemmTile& tile, float factor, const Products (&sums)[kHalves]) {
#pragma unroll
    for (int first = 0; first < kTileColumns; first += kColumnsTogether<D>) {
      if (first > 0) load_c(tile, first);
      if (is_first_ && !arguments_.has_c) wait_for_stores_to_read();
      meet_in(warpgroup_);
      if (arguments_.has_c) {
        wait(c_arrived_, c_parity_);
        c_parity_ ^= 1;
      }
      if (arguments_.bias != nullptr) {
        arguments_.has_c ? fill<true, true>(first, factor, sums) : fill<true, false>(first, factor, sums);
      } else {
        arguments_.has_c ? fill<false, true>(first, factor, sums) : fill<false, false>(first, factor, sums);
      }
      publish_to_copies();
      meet_in(warpgroup_);
      if (is_first_) {
        for (int box = 0; box < kBoxes; ++box) store_box(arguments_.d, corner(tile, first, box), boxes_[box]);
        commit_stores();
      }
    }
  }

  __device__ void end() {
    if (is_first_) wait_for_stores();
  }

 private:
  __device__ Corner corner(const GemmTile& tile, int first, int box) const {
    const int row = tile.row + warpgroup_ * kRowsOfWarpgroup;
    return {tile.column + first + box * kBoxColumns<D>, row, tile.d_matrix};
  }

  __device__ void load_c(const GemmTile& tile, int first) {
    if (!arguments_.has_c || !is_first_) return;
    wait_for_stores_to_read();
    arrive_and_expect(c_arrived_, kBoxes * kBoxBytes);
    for (int box = 0; box < kBoxes; ++box) load_box(arguments_.c, corner(tile, first, box), boxes_[box], c_arrived_);
  }

  template <bool kHasBias, bool kHasC>
  __device__ static float2 finished(const float* sum, float factor, float2 bias, float2 c) {
    float2 d = {sum[0] * factor, sum[1] * factor};
    if constexpr (kHasBias) d = {fmaf(sum[0], factor, bias.x), fmaf(sum[1], factor, bias.y)};
    if constexpr (kHasC) d = {d.x + c.x, d.y + c.y};
    return d;
  }

  // Fills the boxes with the columns from `first` on. The 16-byte pieces of a row are swizzled. A row begins at a
  // multiple of 128 bytes, so the offset of a column is combined with the address by an exclusive or.
  template <bool kHasBias, bool kHasC>
  __device__ void fill(int first, float factor, const Products (&sums)[kHalves]) {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 % 4 * 16;
    // 16 bits: ldmatrix and stmatrix move four matrices of 8 x 8, two above two. Each lane passes the address of one
    // row of one of them.
    const int row = first_row + (sizeof(D) == 2 ? lane % 16 : lane / 4);
    const int byte = sizeof(D) == 2 ? lane / 16 * 16 : lane % 4 * 8;
    const uint32_t start = shared_address(boxes_) + row * kSwizzleBytes + (byte ^ row % 8 * 16);
#pragma unroll
    for (int column = 0; column < kColumnsTogether<D>; column += 8 * kMatrices<D>) {
      const int in_tile = first + column;
      const uint32_t box = start + column / kBoxColumns<D> * kBoxBytes;
      const uint32_t at = box ^ column % kBoxColumns<D> * static_cast<int>(sizeof(D));
      const float* const sum = sums[in_tile / kColumnsOfProduct].of + in_tile % kColumnsOfProduct / 2;
      float2 bias[kMatrices<D>] = {};
#pragma unroll
      for (int i = 0; kHasBias && i < kMatrices<D>; ++i) {
        bias[i] = unpack_two<BiasType<D>>(bias_[in_tile / 2 + 4 * i + lane % 4]);
      }
      if constexpr (sizeof(D) == 2) {
        uint32_t c[4] = {}, d[4];
        if constexpr (kHasC) {
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                       : "r"(at)
                       : "memory");
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // above, below, then both of the matrices to the right
          const float2 pair = finished<kHasBias, kHasC>(sum + 2 * i, factor, bias[i / 2], unpack_two<D>(c[i]));
          d[i] = pack(pair.x, pair.y, D{});
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(d[0]),
                     "r"(d[1]), "r"(d[2]), "r"(d[3])
                     : "memory");
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // above, below
          auto* const pair = reinterpret_cast<float2*>(__cvta_shared_to_generic(at + i * 8 * kSwizzleBytes));
          *pair = finished<kHasBias, kHasC>(sum + 2 * i, factor, bias[0], kHasC ? *pair : float2{});
        }
      }
    }
  }

  const Arguments& arguments_;
  uint8_t (*const boxes_)[kBoxBytes];
  uint32_t* const bias_;
  Barrier& c_arrived_;
  const int warpgroup_;
  const bool is_first_;
  uint32_t c_parity_ = 0;
};

}  // namespace jax_fp8::grouped_gemm
