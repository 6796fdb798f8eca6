// A run of several plans, one after another. The session of one plan hands the kept state to the session of the next by name, as
// through a checkpoint.
#pragma once

#include <utility>
#include <vector>

#include "runtime/session.h"

namespace shardlab::runtime {

/// All that a run keeps from step to step.
using RunState = std::vector<std::pair<StateName, LogicalTensor>>;

/// Out of a session, between steps. Refuses what `Session::states` refuses.
Result<RunState> take_state(const Session& session);

/// Into a session of another plan of the same run. Refuses where that keeps something else: both must name the same state.
Result<void> give_state(const RunState& state, Session& session);

}  // namespace shardlab::runtime
