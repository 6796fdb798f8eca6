// What an op costs in work, never in seconds: flops, memory bytes, payload bytes. Pure functions of the op and its operand types.
#pragma once

#include "plan/base/units.h"
#include "plan/plan.h"

namespace shardlab {

struct WorkAmount {
  Flops flops;
  Bytes memory;   ///< read and written, each operand once
  Bytes payload;  ///< the message of a collective or p2p op, on one rank
};

/// Work of `op` on one rank. Counts: a multiply-add is 2 flops; causal attention counts the half that is needed;
/// elementwise ops count the flops of their formula.
WorkAmount work_of(const Segment& segment, const Op& op, const Mesh& mesh);

/// Extents of a Linear as a matmul [m, n, k], 2mnk flops: F is [tokens, out, in], I [tokens, in, out], W [out, in, tokens].
std::vector<int64_t> matmul_extents(const Segment& segment, const Op& op);

}  // namespace shardlab
