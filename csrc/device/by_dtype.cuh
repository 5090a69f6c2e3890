// Dispatch from the dtypes of a call to a template's arguments.
#pragma once

#include "../dtypes.h"
#include "vector.cuh"

namespace jax_fp8 {

// Calls launch(T{}) with the element type of the source.
template <typename Launch>
void by_dtype(SourceType source, Launch launch) {
  switch (source) {
    case SourceType::kFloat32: return launch(float{});
    case SourceType::kBFloat16: return launch(BFloat16{});
    case SourceType::kFloat16: return launch(Float16{});
  }
}

template <Fp8Type kValue>
struct Fp8Constant {
  static constexpr Fp8Type value = kValue;
};

// Inside a kernel: calls with(Fp8Constant<format>{}). All threads take the same branch.
template <typename With>
__device__ inline void with_format(Fp8Type format, With with) {
  if (format == Fp8Type::kE4M3) {
    with(Fp8Constant<Fp8Type::kE4M3>{});
  } else {
    with(Fp8Constant<Fp8Type::kE5M2>{});
  }
}

// Calls launch(T{}, Fp8Constant<format>{}).
template <typename Launch>
void by_dtype(SourceType source, Fp8Type format, Launch launch) {
  by_dtype(source, [&](auto element) {
    if (format == Fp8Type::kE4M3) {
      launch(element, Fp8Constant<Fp8Type::kE4M3>{});
    } else {
      launch(element, Fp8Constant<Fp8Type::kE5M2>{});
    }
  });
}

}  // namespace jax_fp8
