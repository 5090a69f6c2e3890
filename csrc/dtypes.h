// The element types the kernels know, shared by device code (which knows nothing of XLA) and handlers (which know nothing of CUDA types).
#pragma once

namespace jax_fp8 {

enum class SourceType { kFloat32, kBFloat16, kFloat16 };

enum class Fp8Type { kE4M3, kE5M2 };

}  // namespace jax_fp8
