// Constructs that the language has and neither interpreter supports yet. Executor and simulator refuse them in the same words.
#pragma once

#include "plan/base/result.h"
#include "plan/plan.h"

namespace shardlab {

/// Refuses what would otherwise be taken for something else: row counts known at run time, for which the whole capacity
/// would be computed.
Result<void> check_runnable(const Plan& plan);

}  // namespace shardlab
