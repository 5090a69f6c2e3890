// One step of Adam over all leaves of a parameter tree, in place: moments, master, param,
// and its FP8 values in both orientations.
//
//     m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g²      p -= rate (m̂ / (sqrt(v̂) + eps) + weight_decay p)
//
// Memory bandwidth is the limit. So the kernel reads and writes every array once, and casts the new param to FP8 in the
// same pass. Every operation is float32 and rounded on its own (no fused multiply-add), so that the reference in JAX
// computes the same bits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "by_tile.h"
#include "dtypes.h"
#include "xla/ffi/api/c_api.h"

namespace jax_fp8 {

// Positions in `scalars`. A step with apply == 0 changes nothing.
enum AdamScalar {
  kRate,
  kB1,
  kOneMinusB1,
  kB2,
  kOneMinusB2,
  kEps,
  kWeightDecay,
  kCorrection1,
  kCorrection2,
  kGradScale,
  kApply,
  kAdamScalars,
};

// Positions in a row of `scales`.
enum AdamScale { kCastScale, kMuScaleBefore, kMuScaleAfter, kNuScaleBefore, kNuScaleAfter, kAdamScales };

// Where this device's shard lies in the whole leaf, in words of 32 bits, low words first. Two words hold the index of
// the shard's first element in the whole leaf. Then come four words for each dim, other than the first, that a mesh
// splits. Where such a dim is split, the shard is made of contiguous blocks, with gaps between them in the whole leaf:
// a multiplier and a shift divide an index by the length of a block, and two words hold the gap after a block. All
// words are zero where the device has the whole leaf.
constexpr int kGaps = 2;
constexpr int kPlaceWords = 2 + 4 * kGaps;

// The scalars that a step writes besides a leaf's arrays; null where the leaf has no such scalar.
struct AdamRenewed {
  float* scale;  // of values; the first leaf of a shared cast writes the scale of that cast
  float* mu_scale;
  float* nu_scale;
};

// An absent array is null and its storage kNone. Without a master the param is float32 and its own master.
struct AdamLeaf {
  const void* g;
  void* mu;
  void* nu;  // float32, bfloat16 or FP8, like mu; in FP8 the square root of nu
  void* param;
  void* master;
  uint8_t* values;        // [rows, cols]; in a shared cast, where leaves lie side by side in one matrix: the first of
                          // this leaf's columns
  uint8_t* values_t;      // [cols, rows]
  float* amax;            // of the cast array: the rounded param, or the master without a param; null without values
  int64_t cols;           // without values_t the shape does not matter: cols counts all elements,
  int32_t rows;           // and rows is 1
  int32_t values_stride;  // in a shared cast: bytes from a row of values to the next; 0 for a cast of the leaf's own
  Storage g_storage;
  Storage mu_storage;
  Storage nu_storage;
  Storage param_storage;
  Storage master_storage;
  Storage values_storage;
  bool decays;  // whether weight decay applies
};

// Where a leaf that is cast by tile writes the scales of its squares of 128 x 128; null for all other leaves.
struct AdamSquares {
  float* scales;  // of values: the first square of the leaf
  float* scales_t;
  int32_t scales_stride;    // elements from a row of squares to the next
  int32_t scales_t_stride;  // the same in scales_t
};

struct AdamEntry {
  AdamLeaf leaf;
  AdamRenewed renewed;
  AdamSquares squares;
};

struct AdamArguments {
  const float* scalars;  // [kAdamScalars]
  const float* scales;   // [leaf_count, kAdamScales]
  const uint32_t* seed;
  const uint32_t* places;  // [leaf_count, kPlaceWords]
  const AdamEntry* entries;  // on the host
  int leaf_count;
  int first_leaf;  // the number of the first of these leaves in the whole tree, which several calls may share
  bool adam_w_mode;
  TileRule tile_rule;  // of casts by tile
};

cudaError_t launch_adam(const AdamArguments& arguments, cudaStream_t stream);

extern XLA_FFI_Handler* const adam_handler;

}  // namespace jax_fp8
