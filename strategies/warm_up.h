// Runs of two phases. The steps before some number differ from the steps after it. Each phase has a plan of its own, which says all
// of its step.
#pragma once

#include <cstdint>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/plan.h"

namespace shardlab::strategies {

/// `compression.warmup` of a run that 1-bit Adam never freezes: all of its steps are of the first phase.
inline constexpr int kNeverFrozen = INT32_MAX;

/// The number of optimizer steps of the first phase: they run under the plan of `lower_warm_up`, later steps under the plan of
/// `lower`. Seconds and wire bytes of a step are reported for the second phase. Both phases keep the same state under the same
/// names. 0: the run has one plan for all steps.
int64_t warm_up_steps(const Case& config);

/// The plan of a step of the first phase, verified. Refuses what `lower` refuses; `warm_up_steps` must be above 0.
Result<Plan> lower_warm_up(const Case& config);

}  // namespace shardlab::strategies
