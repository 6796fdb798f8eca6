// A run of several plans, one after another: what it keeps goes from the session of one to that of the next by name, as it goes
// into a checkpoint and out again.
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
