// Compares every constant and struct layout of cublaslt.h with NVIDIA's cublasLt.h. The build compiles this file only
// where it finds that header; it produces no code.
#include <cuda_runtime_api.h>
// cuBLAS's header must come after the toolkit's own.
#include <cublasLt.h>

#include "cublaslt.h"

namespace jax_fp8::cublaslt {

static_assert(kSuccess == CUBLAS_STATUS_SUCCESS);
static_assert(static_cast<int>(kCompute32F) == CUBLAS_COMPUTE_32F);
static_assert(static_cast<int>(kTransA) == CUBLASLT_MATMUL_DESC_TRANSA);
static_assert(static_cast<int>(kTransB) == CUBLASLT_MATMUL_DESC_TRANSB);
static_assert(static_cast<int>(kEpilogue) == CUBLASLT_MATMUL_DESC_EPILOGUE);
static_assert(static_cast<int>(kBiasPointer) == CUBLASLT_MATMUL_DESC_BIAS_POINTER);
static_assert(static_cast<int>(kAScalePointer) == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
static_assert(static_cast<int>(kBScalePointer) == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
static_assert(static_cast<int>(kFastAccumulation) == CUBLASLT_MATMUL_DESC_FAST_ACCUM);
static_assert(static_cast<int>(kBiasDataType) == CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
static_assert(static_cast<int>(kAScaleMode) == CUBLASLT_MATMUL_DESC_A_SCALE_MODE);
static_assert(static_cast<int>(kBScaleMode) == CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
static_assert(static_cast<int>(kOneScale) == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F);
static_assert(static_cast<int>(kScalesOfLines) == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
static_assert(static_cast<int>(kScalesOfSquares) == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
static_assert(static_cast<int>(kEpilogueDefault) == CUBLASLT_EPILOGUE_DEFAULT);
static_assert(static_cast<int>(kEpilogueBias) == CUBLASLT_EPILOGUE_BIAS);
static_assert(static_cast<int>(kNotTransposed) == CUBLAS_OP_N);
static_assert(static_cast<int>(kTransposed) == CUBLAS_OP_T);
static_assert(static_cast<int>(kMaxWorkspaceBytes) == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
static_assert(static_cast<int>(kMinAlignmentA) == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
static_assert(static_cast<int>(kMinAlignmentB) == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
static_assert(static_cast<int>(kMinAlignmentC) == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
static_assert(static_cast<int>(kMinAlignmentD) == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(HeuristicResult) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(HeuristicResult, workspace_bytes) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(HeuristicResult, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));

}  // namespace jax_fp8::cublaslt
