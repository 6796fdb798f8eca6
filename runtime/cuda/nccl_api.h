// The calls of NCCL that shardlab makes, as an interface. The real one is opened at run time (libnccl.so.2, no header needed to
// build); a test's records the sequence.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "plan/base/dtype.h"
#include "plan/base/result.h"
#include "plan/op.h"
#include "runtime/cuda/api.h"

namespace shardlab::runtime::cuda {

/// A ncclComm_t: one rank's handle on one communicator.
struct NcclHandle {
  void* value = nullptr;
  friend bool operator==(const NcclHandle&, const NcclHandle&) = default;
};

/// A ncclUniqueId: what the ranks of a communicator find each other by.
struct NcclId {
  std::array<char, 128> bytes{};
};

/// ncclResult_t. 0 is success.
using NcclStatus = int;

/// Every call returns what NCCL returned. Counts are elements of `dtype`; reductions know f32, f64, bf16, f16, i32 and
/// i64, moves u8.
class NcclApi {
 public:
  virtual ~NcclApi() = default;
  virtual std::string describe(NcclStatus status) = 0;
  virtual NcclStatus version(int* version) = 0;  ///< 22809 for 2.28.9
  virtual NcclStatus unique_id(NcclId* id) = 0;
  virtual NcclStatus init(NcclHandle* handle, int size, const NcclId& id, int index) = 0;
  virtual NcclStatus destroy(NcclHandle handle) = 0;
  virtual NcclStatus abort(NcclHandle handle) = 0;
  /// The first failure on the communicator since it was made, perhaps on another rank.
  virtual NcclStatus async_error(NcclHandle handle, NcclStatus* status) = 0;
  virtual NcclStatus group_start() = 0;
  virtual NcclStatus group_end() = 0;
  virtual NcclStatus all_reduce(const void* source, void* target, int64_t count, DType dtype, ReduceOp reduce, NcclHandle handle,
                                StreamHandle stream) = 0;
  /// `count` elements for each rank, as in the two below.
  virtual NcclStatus reduce_scatter(const void* source, void* target, int64_t count, DType dtype, ReduceOp reduce,
                                    NcclHandle handle, StreamHandle stream) = 0;
  virtual NcclStatus all_gather(const void* source, void* target, int64_t count, DType dtype, NcclHandle handle,
                                StreamHandle stream) = 0;
  virtual NcclStatus broadcast(const void* source, void* target, int64_t count, DType dtype, int root, NcclHandle handle,
                               StreamHandle stream) = 0;
  virtual NcclStatus send(const void* source, int64_t count, DType dtype, int to, NcclHandle handle, StreamHandle stream) = 0;
  virtual NcclStatus receive(void* target, int64_t count, DType dtype, int from, NcclHandle handle, StreamHandle stream) = 0;
};

/// NCCL as it is installed. Refuses (ExitCode::kEnvironment) where it is not, or is older than 2.10 (the first with bf16).
Result<std::unique_ptr<NcclApi>> real_nccl();

/// "2.28.9" of 22809.
std::string nccl_version_text(int version);

/// NCCL's number of an element type (ncclDataType_t), or -1: it has none.
int nccl_type(DType dtype);
/// NCCL's number of a reduction (ncclRedOp_t).
int nccl_reduction(ReduceOp reduce);

}  // namespace shardlab::runtime::cuda
