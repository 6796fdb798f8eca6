// The calls of cuBLASLt that shardlab makes, as an interface. The real one is opened at run time (libcublasLt.so.13 or .12, no
// header needed to build): a program that never multiplies on a GPU neither waits for it nor needs it. A test's keeps descriptors
// of its own and multiplies on the host.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/cuda/cublaslt_names.h"
#include "plan/base/result.h"

namespace shardlab::gpu {

/// cublasStatus_t. 0 is success.
using CublasStatus = int;
using CublasLtHandle = void*;
/// A cublasLtMatmulDesc_t, cublasLtMatrixLayout_t or cublasLtMatmulPreference_t.
using CublasLtDescriptor = void*;

/// cublasLtMatmulAlgo_t: opaque, copied as it is.
struct CublasLtAlgorithm {
  std::array<uint64_t, 8> words{};
};
/// cublasLtMatmulHeuristicResult_t, member by member.
struct CublasLtProposal {
  CublasLtAlgorithm algorithm;
  uint64_t workspace = 0;   ///< bytes
  CublasStatus status = 0;  ///< the rest holds where this is success
  float waves = 0;
  std::array<int32_t, 4> reserved{};
};

/// Matrices count columns first: element (i, j) is at i + j * leading.
struct CublasLtMatrix {
  CublasLtDescriptor layout = nullptr;
  const void* data = nullptr;
};
/// D = alpha op(A) op(B) + beta D, and what the product's epilogue adds.
struct CublasLtCall {
  CublasLtDescriptor product = nullptr;
  CublasLtMatrix a, b;
  CublasLtDescriptor d = nullptr;  ///< layout of the summand and of the result
  void* data = nullptr;
  float alpha = 1, beta = 0;
  CublasLtAlgorithm algorithm;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

/// Every call returns what cuBLASLt returned. One handle and its descriptors are used by one thread at a time.
class CublasLtApi {
 public:
  virtual ~CublasLtApi() = default;
  virtual int64_t version() = 0;                            ///< 130100 for 13.1.0
  virtual std::string describe(CublasStatus status) = 0;    ///< "CUBLAS_STATUS_NOT_SUPPORTED"
  virtual CublasStatus create(CublasLtHandle* handle) = 0;  ///< on the calling thread's device
  virtual CublasStatus destroy(CublasLtHandle handle) = 0;
  /// Factors are multiplied by fp32 scalars.
  virtual CublasStatus create_product(CublasLtDescriptor* product, cublaslt::Compute compute) = 0;
  virtual CublasStatus destroy_product(CublasLtDescriptor product) = 0;
  virtual CublasStatus set(CublasLtDescriptor product, cublaslt::ProductName name, const void* value, size_t bytes) = 0;
  virtual CublasStatus create_layout(CublasLtDescriptor* layout, cublaslt::DataType type, int64_t rows, int64_t columns,
                                     int64_t leading) = 0;
  virtual CublasStatus destroy_layout(CublasLtDescriptor layout) = 0;
  virtual CublasStatus create_preference(CublasLtDescriptor* preference) = 0;
  virtual CublasStatus destroy_preference(CublasLtDescriptor preference) = 0;
  virtual CublasStatus set(CublasLtDescriptor preference, cublaslt::PreferenceName name, const void* value, size_t bytes) = 0;
  /// The library's proposals for a call, the best first; data, scalars, algorithm and workspace of the call are not looked at.
  virtual CublasStatus propose(CublasLtHandle handle, const CublasLtCall& call, CublasLtDescriptor preference, int requested,
                               CublasLtProposal* proposals, int* found) = 0;
  virtual CublasStatus multiply(CublasLtHandle handle, const CublasLtCall& call, void* stream) = 0;
};

/// cuBLASLt as it is installed. Refuses (ExitCode::kEnvironment) where it is not, or lacks a function.
Result<std::unique_ptr<CublasLtApi>> real_cublaslt();

/// "13.1.0" of 130100.
std::string cublaslt_version_text(int64_t version);

}  // namespace shardlab::gpu
