// Outcomes and a report as a sweep over sixteen layouts could have left them; the figures are made up, and fixed.
#pragma once

#include <vector>

#include "plan/outcome.h"
#include "plan/program.h"
#include "plan/trace.h"
#include "reports/html.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// A single-rank case that is ok, with prediction, measurement, five losses and three ops.
CaseOutcome small_outcome();

/// Nineteen cases: fifteen ok on 1 to 8 ranks, and one of every other status.
std::vector<CaseOutcome> sweep_outcomes();

/// Two data-parallel ranks whose role calls segment "layer.F" so often: thirty ops on stream "compute", and one on "comm".
Plan plan_of_calls(int calls);

/// A predicted step of `plan_of_calls`, in which both ranks do the same. Ops last 1 to 30 us, one after the other; the op on "comm"
/// begins 250 ns after a wait of 1 us, and waits for its peer longer from call to call. Every tenth call's last op takes 5 us more.
/// From call 1 on stream "compute" waits for 4 us and half a nanosecond times the number of the call before each.
Trace trace_of_calls(const Program& program);

/// A page of one case, simulated, with the timeline of 200 such calls.
Report simulated_report();

/// `sweep_outcomes` with metadata and the timelines of two of them.
Report sweep_report();

}  // namespace shardlab::testing
