// cuBLASLt's numbers for what shardlab asks of it, so that no build needs its headers; a test compares them with the headers where
// these are. Source: cublasLt.h, cublas_api.h and library_types.h of CUDA 12 and 13, which agree.
#pragma once

#include <cstdint>

namespace shardlab::gpu::cublaslt {

/// cudaDataType_t.
enum class DataType : int32_t { kF32 = 0, kF16 = 2, kBF16 = 14 };
/// cublasComputeType_t.
enum class Compute : int32_t { kF32 = 68, kTf32 = 77 };
/// cublasOperation_t.
enum class Turn : int32_t { kNone = 0, kTransposed = 1 };
/// cublasLtEpilogue_t: a bias is one number a row of D.
enum class Epilogue : int32_t { kNone = 1, kBias = 4 };
/// cublasLtMatmulDescAttributes_t.
enum class ProductName : int32_t { kTurnA = 3, kTurnB = 4, kEpilogue = 7, kBias = 8, kBiasType = 26 };
/// cublasLtMatmulPreferenceAttributes_t.
enum class PreferenceName : int32_t { kMostWorkspace = 1, kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7, kAlignmentD = 8 };
/// cublasStatus_t.
inline constexpr int kInvalidValue = 7;
inline constexpr int kExecutionFailed = 13;
inline constexpr int kNotSupported = 15;

}  // namespace shardlab::gpu::cublaslt
