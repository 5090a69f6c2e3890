#include "grouped_gemm.h"

#include <utility>

#include "device/grouped_gemm.cuh"
#include "kernel_launch.h"
#include "launch.h"
#include "tensor_map.h"

namespace jax_fp8::grouped_gemm {
namespace {

std::pair<CUtensorMapDataType, int> type_of(SourceType type) {
  switch (type) {
    case SourceType::kFloat32: return {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4};
    case SourceType::kBFloat16: return {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2};
    default: return {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2};
  }
}

int64_t filled_up(int64_t scales) { return round_up(scales, 4); }

template <Groups kGroups>
std::string describe_all(const Problem& problem, const Operands& operands, Arguments* arguments) {
  const ProductShape& shape = problem.shape;
  constexpr bool kRows = kGroups == Groups::kRows, kDepth = kGroups == Groups::kDepth;
  const CUtensorMapDataType bytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  std::string error = describe(&arguments->a, operands.a, bytes, 1, {shape.k, shape.m, 1}, kTileRows);
  if (!error.empty()) return error;
  const Extent of_b = {shape.k, shape.n, kRows ? shape.groups : 1, problem.side_by_side};
  error = describe(&arguments->b, operands.b, bytes, 1, of_b, kColumnsOfProduct);
  if (!error.empty()) return error;
  const auto [type, size] = type_of(problem.d);
  const Extent extent = {shape.n, shape.m, kDepth ? shape.groups : 1};
  error = describe(&arguments->d, operands.d, type, size, extent, kRowsOfWarpgroup);
  if (!error.empty() || operands.c == nullptr) return error;
  return describe(&arguments->c, operands.c, type, size, extent, kRowsOfWarpgroup);
}

template <Groups kGroups, Fp8Type kA, Fp8Type kB, bool kByTile, typename D>
std::string launch(const Problem& problem, const Operands& operands, cudaStream_t stream) {
  const ProductShape& shape = problem.shape;
  const int64_t steps = divide_up(shape.k, kTileDepth), squares = divide_up(shape.n, kColumnsOfProduct);
  Arguments arguments = {.shape = shape,
                         .a_scale = operands.a_scale,
                         .b_scale = operands.b_scale,
                         .a_scale_row = filled_up(shape.m),
                         .b_scale_row = filled_up(steps),
                         .b_scale_matrix = squares * filled_up(steps),
                         .bias = operands.bias,
                         .starts = operands.starts,
                         .alpha = problem.alpha,
                         .has_c = operands.c != nullptr};
  if (std::string error = describe_all<kGroups>(problem, operands, &arguments); !error.empty()) return error;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const auto kernel_of = kernel<kGroups, kA, kB, kByTile, D>;
  if (error == cudaSuccess) error = allow_shared_bytes(kernel_of, kSharedBytes);
  if (error == cudaSuccess) {
    const int pairs = GemmTiles<kGroups>{shape, nullptr}.pairs();
    const Clusters clusters{
        .blocks = 2 * std::min(pairs, processors / 2),
        .blocks_per_cluster = 2,
        .threads = kThreads,
        .shared_bytes = kSharedBytes,
    };
    error = ClusterLaunch(clusters, stream)(kernel_of, arguments);
  }
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

template <Groups kGroups, Fp8Type kA, Fp8Type kB, bool kByTile>
std::string by_result(const Problem& problem, const Operands& operands, cudaStream_t stream) {
  switch (problem.d) {
    case SourceType::kFloat32: return launch<kGroups, kA, kB, kByTile, float>(problem, operands, stream);
    case SourceType::kBFloat16: return launch<kGroups, kA, kB, kByTile, BFloat16>(problem, operands, stream);
    default: return launch<kGroups, kA, kB, kByTile, Float16>(problem, operands, stream);
  }
}

template <Groups kGroups, bool kByTile>
std::string by_types(const Problem& problem, const Operands& operands, cudaStream_t stream) {
  constexpr Fp8Type kE4M3 = Fp8Type::kE4M3, kE5M2 = Fp8Type::kE5M2;
  if (problem.a == kE4M3 && problem.b == kE4M3) {
    return by_result<kGroups, kE4M3, kE4M3, kByTile>(problem, operands, stream);
  }
  if constexpr (kByTile) return "by tile both operands must be E4M3";
  if (problem.a == problem.b) return "the tensor cores do not multiply E5M2 by E5M2";
  if constexpr (!kByTile) {
    if (problem.a == kE5M2) return by_result<kGroups, kE5M2, kE4M3, kByTile>(problem, operands, stream);
    return by_result<kGroups, kE4M3, kE5M2, kByTile>(problem, operands, stream);
  }
}

}  // namespace

bool is_available() {
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}

std::string enqueue(const Problem& problem, const Operands& operands, cudaStream_t stream) {
  if (problem.shape.groups > kMaxGroups) {
    return "a grouped product must have at most " + std::to_string(kMaxGroups) + " groups, got " +
           std::to_string(problem.shape.groups);
  }
  switch (problem.kind) {
    case Groups::kNone:
      if (!problem.by_tile) return "a product without groups must have operands scaled by tile";
      return by_types<Groups::kNone, true>(problem, operands, stream);
    case Groups::kRows:
      return problem.by_tile ? by_types<Groups::kRows, true>(problem, operands, stream)
                             : by_types<Groups::kRows, false>(problem, operands, stream);
    default:
      return problem.by_tile ? by_types<Groups::kDepth, true>(problem, operands, stream)
                             : by_types<Groups::kDepth, false>(problem, operands, stream);
  }
}

}  // namespace jax_fp8::grouped_gemm
