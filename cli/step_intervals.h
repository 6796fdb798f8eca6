// How far the estimated step times of a sweep can be trusted.
#pragma once

#include "cli/namespaces.h"
#include "reports/html.h"

namespace shardlab::cli {

/// Seconds that nine of ten runs like a case take at least, and at most: columns without values.
ExtraColumn step_low_column();
ExtraColumn step_high_column();

/// Adds the columns `step_low_s` and `step_high_s` to a report some of whose cases are estimates of a framework's run: each such case that
/// fits has the seconds that nine of ten runs like it lie between. Adds nothing to other reports: the error of shardlab's own executor
/// is that of its calibration, which a run itself measures.
void add_step_intervals(Report& report);

}  // namespace shardlab::cli
