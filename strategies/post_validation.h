#pragma once
#include <string_view>

#include "plan/buffer.h"
#include "plan/op.h"
namespace shardlab::strategies {
struct Draft;
struct StageDraft;
/// See post_validation.cpp.
void post_validation(Draft& draft);
/// The stream on which stages learn of one another's gradients: the compute stream, or one of its own where no update waits for it.
StreamId meeting_stream(Draft& draft);
/// What the end of the period judges of each step, in `StageDraft::named`: the squared norm of its gradients, and whether they are not
/// finite.
inline constexpr std::string_view kValidatedNorm = "grad_norm2", kValidatedFlag = "found_inf";
}  // namespace shardlab::strategies
