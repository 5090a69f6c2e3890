// jax_fp8._kernels: the table from target names to handlers, and facts about this build. jax_fp8/kernels/extension.py
// registers the table with XLA.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#ifdef JAX_FP8_WITH_CUDA
#include "activation.h"
#include "adam.h"
#include "amax.h"
#include "cached_attention.h"
#include "chain.h"
#include "cross_entropy.h"
#include "cublaslt.h"
#include "few_rows_gemm.h"
#include "gemm.h"
#include "grouped_gemm.h"
#include "norm.h"
#include "quantize.h"
#include "take_rows.h"
#include "transpose.h"
#include "uninitialized.h"
#include "update_state.h"
#include "weight_gradient.h"
#endif

namespace py = pybind11;

namespace {

#ifdef JAX_FP8_WITH_CUDA

using namespace jax_fp8;

py::capsule capsule(XLA_FFI_Handler* handler) { return py::capsule(reinterpret_cast<void*>(handler)); }

// name -> stage -> handler
py::dict targets() {
  using namespace py::literals;
  py::dict table;
  table["jax_fp8_quantize"] = py::dict("execute"_a = capsule(quantize_handler));
  table["jax_fp8_quantize_transpose"] = py::dict("execute"_a = capsule(quantize_transpose_handler));
  table["jax_fp8_quantize_transpose_sums"] = py::dict("execute"_a = capsule(quantize_transpose_sums_handler));
  table["jax_fp8_quantize_by_tile"] = py::dict("execute"_a = capsule(quantize_by_tile_handler));
  table["jax_fp8_quantize_by_tile_sums"] = py::dict("execute"_a = capsule(quantize_by_tile_sums_handler));
  table["jax_fp8_uninitialized"] = py::dict("execute"_a = capsule(uninitialized_handler));
  table["jax_fp8_transpose"] = py::dict("execute"_a = capsule(transpose_handler));
  table["jax_fp8_take_rows"] = py::dict("execute"_a = capsule(take_rows_handler));
  table["jax_fp8_activation_quantize"] = py::dict("execute"_a = capsule(activation_quantize_handler));
  table["jax_fp8_activation_quantize_by_tile"] = py::dict("execute"_a = capsule(activation_quantize_by_tile_handler));
  table["jax_fp8_activation_amax"] = py::dict("execute"_a = capsule(activation_amax_handler));
  table["jax_fp8_activation_backward_quantize"] = py::dict("execute"_a = capsule(activation_backward_quantize_handler));
  table["jax_fp8_activation_backward_quantize_by_tile"] =
      py::dict("execute"_a = capsule(activation_backward_quantize_by_tile_handler));
  table["jax_fp8_activation_backward_amax"] = py::dict("execute"_a = capsule(activation_backward_amax_handler));
  table["jax_fp8_amax"] = py::dict("execute"_a = capsule(amax_handler));
  table["jax_fp8_adam"] = py::dict("execute"_a = capsule(adam_handler));
  table["jax_fp8_update_state"] = py::dict("execute"_a = capsule(update_state_handler));
  table["jax_fp8_norm_quantize"] = py::dict("execute"_a = capsule(norm_quantize_handler));
  table["jax_fp8_norm_quantize_by_tile"] = py::dict("execute"_a = capsule(norm_quantize_by_tile_handler));
  table["jax_fp8_norm_amax"] = py::dict("execute"_a = capsule(norm_amax_handler));
  table["jax_fp8_norm_backward"] = py::dict("execute"_a = capsule(norm_backward_handler));
  table["jax_fp8_cached_attention"] = py::dict("execute"_a = capsule(cached_attention_handler));
  table["jax_fp8_chain"] = py::dict("execute"_a = capsule(chain_handler));
  table["jax_fp8_cross_entropy"] = py::dict("execute"_a = capsule(cross_entropy_handler));
  table["jax_fp8_few_rows_gemm"] = py::dict("execute"_a = capsule(few_rows_gemm_handler));
  table["jax_fp8_grouped_gemm"] = py::dict("execute"_a = capsule(grouped_gemm_handler));
  table["jax_fp8_grouped_gemm_weight_gradient"] =
      py::dict("execute"_a = capsule(grouped_gemm_weight_gradient_handler));
  table["jax_fp8_gemm"] = py::dict("instantiate"_a = capsule(gemm_instantiate_handler),
                                   "initialize"_a = capsule(gemm_initialize_handler),
                                   "execute"_a = capsule(gemm_execute_handler));
  table["jax_fp8_weight_gradient"] = py::dict("instantiate"_a = capsule(weight_gradient_instantiate_handler),
                                              "initialize"_a = capsule(weight_gradient_initialize_handler),
                                              "execute"_a = capsule(weight_gradient_execute_handler));
  return table;
}

// name -> the id and the functions by which XLA owns and destroys a value of the type
py::dict types() {
  using namespace py::literals;
  py::dict table;
  table["jax_fp8_gemm_state"] =
      py::dict("type_id"_a = py::capsule(gemm_state_type_id()),
               "type_info"_a = py::capsule(const_cast<XLA_FFI_TypeInfo*>(gemm_state_type_info())));
  table["jax_fp8_weight_gradient_state"] =
      py::dict("type_id"_a = py::capsule(weight_gradient_state_type_id()),
               "type_info"_a = py::capsule(const_cast<XLA_FFI_TypeInfo*>(weight_gradient_state_type_info())));
  return table;
}

int cuda_version() { return CUDART_VERSION; }

std::string architectures() { return JAX_FP8_ARCHITECTURES; }

std::string why_no_kernels() { return ""; }

// (version, reason): exactly one of them is empty.
std::pair<std::string, std::string> cublaslt_version() {
  const std::string& missing = cublaslt::library().missing;
  if (!missing.empty()) return {"", missing};
  return {cublaslt::version_name(), ""};
}

#else

py::dict targets() { return {}; }
py::dict types() { return {}; }
int cuda_version() { return 0; }
std::string architectures() { return ""; }
std::string why_no_kernels() { return JAX_FP8_WHY_NO_KERNELS; }
std::pair<std::string, std::string> cublaslt_version() { return {"", "this build of jax_fp8 has no CUDA kernels"}; }

#endif

}  // namespace

PYBIND11_MODULE(_kernels, module) {
  module.doc() = "CUDA kernels of jax_fp8 as XLA FFI handlers; empty tables when built without nvcc.";
  module.def("targets", &targets, "target name -> {stage: handler}");
  module.def("types", &types, "type name -> {type_id, type_info}");
  module.def("cuda_version", &cuda_version, "CUDA version of the build, 1000 * major + 10 * minor; 0 without kernels");
  module.def("architectures", &architectures, "GPU architectures compiled for, in CMake's words, separated by spaces");
  module.def("why_no_kernels", &why_no_kernels, "what made this a build without kernels; empty with them");
  module.def("cublaslt_version", &cublaslt_version, "(version, '') or ('', reason it cannot be used)");
}
