// The element types the kernels know, shared by device code (which knows nothing of XLA) and handlers (which know
// nothing of CUDA types).
#pragma once

#include <cstdint>

namespace jax_fp8 {

enum class SourceType { kFloat32, kBFloat16, kFloat16 };

enum class Fp8Type { kE4M3, kE5M2 };

// The format in which an array of an optimizer's state is stored. kRemainder is the low 16 bits of a float32 master
// that rounds to the bfloat16 param: param and remainder together are the master.
enum class Storage : uint8_t { kNone, kFloat32, kBFloat16, kFloat16, kE4M3, kE5M2, kRemainder };

}  // namespace jax_fp8
