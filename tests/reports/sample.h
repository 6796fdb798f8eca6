// Outcomes and a report as a sweep over sixteen layouts could have left them; the figures are made up, and fixed.
#pragma once

#include <vector>

#include "plan/outcome.h"
#include "reports/html.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// A single-rank case that is ok, with prediction, measurement, five losses and three ops.
CaseOutcome small_outcome();

/// Nineteen cases: fifteen ok on 1 to 8 ranks, and one of every other status.
std::vector<CaseOutcome> sweep_outcomes();

/// `sweep_outcomes` with metadata and the timelines of two of them.
Report sweep_report();

}  // namespace shardlab::testing
