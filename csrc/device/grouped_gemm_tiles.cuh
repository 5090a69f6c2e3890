// Which part of a product a thread block makes, and in which order. A pair of neighbouring blocks, a cluster, makes two
// tiles beside each other of 128 x 256 elements, and then the pair that lies as many further as there are clusters.
#pragma once

#include <cstdint>

namespace jax_fp8 {

constexpr int kTileRows = 128, kTileColumns = 256, kTileDepth = 128;
constexpr int kBandRows = 2048;  // made together: the clusters of one wave share rows of a and of b in the L2 cache
constexpr int kMaxGroups = 1024;

// What a product has several of. kRows: matrices b, each for a group of rows of a. kDepth: products, each of a group
// of columns of a and of b.
enum class Groups { kNone, kRows, kDepth };

struct ProductShape {
  int m, n, k;
  int groups;  // 1 without
};

// One tile of the result: its first row and column, in which matrix of the result and of b, and which columns of a and
// b are contracted; whether its rows are of any group, else they become zeros; whether both blocks read the same of b.
struct GemmTile {
  int row, column, d_matrix, b_matrix, first_depth, end_depth;
  bool has_group, shares_b;
};

__host__ __device__ constexpr int parts_of(int size, int part) { return (size + part - 1) / part; }

template <Groups kGroups>
struct GemmTiles {
  static constexpr int kPairRows = 2 * kTileRows, kBand = kBandRows / kPairRows;

  ProductShape shape;
  const int32_t* starts;  // [groups + 1]: where each group begins, and where the last one ends; multiples of 128

  __host__ __device__ int pairs_down() const { return parts_of(shape.m, kPairRows); }
  __host__ __device__ int pairs_across() const { return parts_of(shape.n, kTileColumns); }
  __host__ __device__ int pairs() const {
    return pairs_down() * pairs_across() * (kGroups == Groups::kDepth ? shape.groups : 1);
  }

  // Of one block, the first or second of its cluster. Down the columns of one band, then of the next.
  __host__ __device__ GemmTile tile(int pair, int block) const {
    const int of_matrix = pairs_down() * pairs_across(), matrix = pair / of_matrix, within = pair % of_matrix;
    const int band = within / (kBand * pairs_across()), in_band = within % (kBand * pairs_across());
    const int rest = pairs_down() - band * kBand, height = rest < kBand ? rest : kBand;
    const int first_row = (band * kBand + in_band % height) * kPairRows;
    GemmTile tile = {first_row + block * kTileRows, in_band / height * kTileColumns, 0, 0, 0, shape.k, true, true};
    if constexpr (kGroups == Groups::kRows) {
      // Both blocks take the same steps, so a block without a group goes through those of the last one for nothing.
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
