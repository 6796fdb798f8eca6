// Constructs that the language has and neither interpreter supports yet. Executor and simulator refuse them in the same words.
#pragma once

#include "plan/base/result.h"
#include "plan/plan.h"

namespace shardlab {

/// Refuses a plan with a buffer or slot whose row count is known only at run time (`count`): every row of its extent would be computed.
Result<void> check_runnable(const Plan& plan);

}  // namespace shardlab
