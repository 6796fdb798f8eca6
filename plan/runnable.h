// What the language can say and neither interpreter does yet. Executor and simulator refuse the same, in the same words.
#pragma once

#include "plan/base/result.h"
#include "plan/plan.h"

namespace shardlab {

/// Refuses what would otherwise be taken for something else: row counts known at run time, for which the whole capacity would be
/// computed.
Result<void> check_runnable(const Plan& plan);

}  // namespace shardlab
