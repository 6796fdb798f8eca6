// The plan's ops on operands of narrow floating-point storage: round(fp32 of the widened operands), see kernels/mixed.h.
#pragma once

#include "plan/base/result.h"
#include "runtime/scratch_launch.h"

namespace shardlab::runtime {

/// Whether an operand is stored narrower than f32, or an update scales its gradient by a factor, so that `bind_mixed` is who binds
/// the op. A copy to the same type is none.
bool is_mixed(const BoundOp& op);

/// Refuses types that an op does not take in this place: statistics, losses and token ids have the plan's.
Result<ScratchLaunch> bind_mixed(const BoundOp& op, const BindTools& tools);

}  // namespace shardlab::runtime
