// The NCCL calls that a plan comes to: a pure function, so that what the transport really calls can be held to it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/base/result.h"
#include "plan/plan.h"
#include "plan/program.h"
#include "runtime/transport.h"

namespace shardlab::runtime::cuda {

/// One call of one rank. Reductions are in the plan's element type; whatever is only moved is moved as bytes. Packed rows are moved in their
/// element type: where messages lie on top of one another (CollectiveCall::room), each element is of one of them, and so a number.
struct NcclCall {
  enum class Kind : uint8_t { kGroupStart, kGroupEnd, kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kReceive } kind;
  CommId comm;
  int64_t count = 0;  ///< as NCCL counts: of one rank's part in a reduce_scatter and an all_gather
  DType dtype = DType::u8;
  ReduceOp reduce = ReduceOp::kSum;
  int peer = -1;                   ///< group index: the root of a broadcast, the other side of a message
  int64_t source = 0, target = 0;  ///< bytes from where the op's operands begin
  friend bool operator==(const NcclCall&, const NcclCall&) = default;
};

/// The calls for one instruction that communicates.
struct NcclOp {
  int32_t instruction = -1;
  int32_t stream = 0;
  std::vector<NcclCall> calls;
  /// It moves packed rows. `calls` are those of an even route, which a rehearsal makes; a run makes `counted_calls`.
  bool counted = false;
};

/// The calls of `rank`, in issue order. They are made in that order whatever their streams, because NCCL asks for one order of
/// launches on a device across communicators. An all_to_all is a group of sends and receives. A collective that is cut in strips is
/// a group with one collective a strip. A cyclic send and its receive (next to it on its stream and communicator) are one group,
/// opened by the first and closed by the second, so that nobody waits in a ring.
///
/// Refuses what NCCL cannot do: parts of unequal size, element types that it does not reduce, a cyclic message alone, a predicate.
Result<std::vector<NcclOp>> nccl_calls(const Plan& plan, const Program& program, int rank);

/// The calls of an all_to_all of packed rows whose counts are on the host: a group of sends and receives of true sizes, and none of no rows.
std::vector<NcclCall> counted_calls(CommId comm, const CollectiveCall& call, int size, int index, int rank);

/// "#12 @comm: all_reduce dp.grads f32 x 1024 sum", one line an op; calls of one op are joined by "; ".
std::string to_text(const Plan& plan, const std::vector<NcclOp>& ops);
/// "all_reduce dp.grads f32 x 1024 sum", "send pp.fwd u8 x 64 to 1", "group {", "}".
std::string to_text(const Plan& plan, const NcclCall& call);

}  // namespace shardlab::runtime::cuda
