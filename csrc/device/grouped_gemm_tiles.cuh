// Which tiles of a product a thread block computes, and in which order. A cluster is a pair of blocks. It computes a
// pair of tiles of 128 x 256 elements, one below the other, and then goes on by as many pairs as there are clusters.
#pragma once

#include <cstdint>

namespace jax_fp8 {

constexpr int kTileRows = 128, kTileColumns = 256, kTileDepth = 128;
// The order goes through the result in bands of so many rows: the clusters that run at the same time then share rows of
// a and of b in the L2 cache.
constexpr int kBandRows = 2048;
constexpr int kMaxGroups = 1024;

// What the groups are. kRows: each group of rows of a has a matrix b of its own. kDepth: each group of columns of a and
// b (the contracted dim) has a product of its own.
enum class Groups { kNone, kRows, kDepth };

struct ProductShape {
  int m, n, k;
  int groups;  // 1 without groups
};

// One tile of the result: its first row and column, its matrix of the result and of b, and the range of columns of a
// and b that it contracts. `has_group` says whether its rows belong to a group; else they become zeros. `shares_b` says
// whether both blocks of the cluster read the same rows of b.
struct GemmTile {
  int row, column, d_matrix, b_matrix, first_depth, end_depth;
  bool has_group, shares_b;
};

__host__ __device__ constexpr int parts_of(int size, int part) { return (size + part - 1) / part; }

template <Groups kGroups>
struct GemmTiles {
  static constexpr int kPairRows = 2 * kTileRows, kBand = kBandRows / kPairRows;

  ProductShape shape;
  const int32_t* starts;  // [groups + 1]: the start of each group, and the end of the last; multiples of 128

  __host__ __device__ int pairs_down() const { return parts_of(shape.m, kPairRows); }
  __host__ __device__ int pairs_across() const { return parts_of(shape.n, kTileColumns); }
  __host__ __device__ int pairs() const {
    return pairs_down() * pairs_across() * (kGroups == Groups::kDepth ? shape.groups : 1);
  }

  // The tile of block 0 or 1 of the cluster. Pairs go down each column of a band, then on to the next column, then to
  // the next band.
  __host__ __device__ GemmTile tile(int pair, int block) const {
    const int of_matrix = pairs_down() * pairs_across(), matrix = pair / of_matrix, within = pair % of_matrix;
    const int band = within / (kBand * pairs_across()), in_band = within % (kBand * pairs_across());
    const int rest = pairs_down() - band * kBand, height = rest < kBand ? rest : kBand;
    const int first_row = (band * kBand + in_band % height) * kPairRows;
    GemmTile tile = {first_row + block * kTileRows, in_band / height * kTileColumns, 0, 0, 0, shape.k, true, true};
    if constexpr (kGroups == Groups::kRows) {
      // Both blocks must take the same steps, since they release stages to each other. So a block without a group
      // computes with the last group's b, and drops the result.
      const int last = shape.groups - 1, other = group_of(first_row + (1 - block) * kTileRows);
      const int group = group_of(tile.row);
      tile.has_group = group <= last;
      tile.b_matrix = tile.has_group ? group : last;
      tile.shares_b = tile.b_matrix == (other <= last ? other : last);
      if (first_row >= starts[shape.groups]) tile.end_depth = 0;
    } else if constexpr (kGroups == Groups::kDepth) {
      tile.d_matrix = matrix;
      tile.first_depth = starts[matrix];
      tile.end_depth = starts[matrix + 1];
    }
    return tile;
  }

 private:
  // The number of groups that end at this row or before it.
  __host__ __device__ int group_of(int row) const {
    int first = 0, end = shape.groups;
    while (first < end) {
      const int middle = (first + end) / 2;
      if (starts[middle + 1] <= row) {
        first = middle + 1;
      } else {
        end = middle;
      }
    }
    return first;
  }
};

}  // namespace jax_fp8
