// One step of Adam over all leaves of a parameter tree, in place: moments, master, param,
// and its FP8 values in both orientations.
//
//     m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g²      p -= rate (m̂ / (sqrt(v̂) + eps) + weight_decay p)
//
// Memory is the limit: every array is read once and written once, and whatever is derived from the new param leaves in
// the same pass. Every operation is float32, rounded by itself, so that the reference in JAX arrives at the same bits.
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

// Where the elements of a leaf that are here lie in the whole leaf, in words of 32 bits, low ones first: the index of
// the first; and for each dim but the first that a mesh splits, the multiplier and the shift that divide by the length
// of a block here, and the gap after a block. All zero where the leaf is here as a whole.
constexpr int kGaps = 2;
constexpr int kPlaceWords = 2 + 4 * kGaps;

// The scalars that a step renews beside a leaf's arrays; null where there is none.
struct AdamRenewed {
  float* scale;  // of values; of a shared cast, its first leaf renews it
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
  uint8_t* values;        // [rows, cols]; in a cast that leaves side by side share:
                          // its columns among those of the others
  uint8_t* values_t;      // [cols, rows]
  float* amax;            // of what is cast: the rounded param, or the master where there is none; null without values
  int64_t cols;           // all elements without values_t: then the shape does not matter,
  int32_t rows;           // and this is 1
  int32_t values_stride;  // of a shared cast: from a row of values to the next; 0 where the values are the leaf's own
  Storage g_storage;
  Storage mu_storage;
  Storage nu_storage;
  Storage param_storage;
  Storage master_storage;
  Storage values_storage;
  bool decays;
};

// Where a leaf that is cast by tile puts the scales of its squares of 128 x 128; null for all others.
struct AdamSquares {
  float* scales;  // of values, from the first square of the leaf on
  float* scales_t;
  int32_t scales_stride;    // from a row of squares to the next
  int32_t scales_t_stride;  // of scales_t
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
  int first_leaf;  // the number of the first one within the tree, of which these may be a part
  bool adam_w_mode;
  TileRule tile_rule;  // of casts by tile
};

cudaError_t launch_adam(const AdamArguments& arguments, cudaStream_t stream);

extern XLA_FFI_Handler* const adam_handler;

}  // namespace jax_fp8
