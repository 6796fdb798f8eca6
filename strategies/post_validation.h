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
/// What the end of the period is to judge of each step: the squared norm of its gradients, or whether they are not finite.
inline constexpr std::string_view kValidatedNorm = "validated.norm", kValidatedFlag = "validated.flag";
void validate_at_end(StageDraft& stage, std::string_view what, BufferId number);
}  // namespace shardlab::strategies
