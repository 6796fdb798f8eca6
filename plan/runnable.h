// What the language can say and neither interpreter does yet. Executor and simulator refuse the same, in the same words.
#pragma once

#include "plan/base/result.h"
#include "plan/plan.h"

namespace shardlab {

/// Refuses what would otherwise be taken for something else: a plan of several optimizer steps (`period`), which would run and be
/// timed as one step with one learning rate, and row counts known at run time, for which the whole capacity would be computed.
Result<void> check_runnable(const Plan& plan);

}  // namespace shardlab
