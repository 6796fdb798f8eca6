// Runs of two phases, a plan each: steps before some number do something else than those after, and the plan of either says all of
// it.
#pragma once

#include <cstdint>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/plan.h"

namespace shardlab::strategies {

/// `compression.warmup` of a run that 1-bit Adam never freezes: all of its steps are of the first phase.
inline constexpr int kNeverFrozen = INT32_MAX;

/// Optimizer steps below this run under the plan of `lower_warm_up`, the others under that of `lower`, of which seconds and wire
/// bytes of a step are said. Both keep the same state from step to step under the same names. 0: one plan for all steps.
int64_t warm_up_steps(const Case& config);

/// The plan of a step of the first phase, verified. Refuses what `lower` refuses; `warm_up_steps` must be above 0.
Result<Plan> lower_warm_up(const Case& config);

}  // namespace shardlab::strategies
