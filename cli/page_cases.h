// What a page shows of some cases only: timelines, the memory of each stage, the algorithms of collectives, the whole case as YAML.
#pragma once

#include <set>
#include <string>

#include "cases/recorded_case.h"
#include "cli/namespaces.h"
#include "reports/html.h"

namespace shardlab::cli {

/// A report holds at most this many timelines, of measured steps each at most so many intervals, and of all others together at most so
/// many calls, but each a few: a page stays below a few megabytes, and opens at once.
inline constexpr int kTimelines = 24;
inline constexpr int64_t kIntervals = 8000;
inline constexpr int64_t kCalls = 300'000, kFewCalls = 4000;

/// Adds the timeline of a case, and what its plan says of its stages and collectives, from the plan and the traces that it left. False
/// where it left none.
bool add_recorded(const RecordedCase& recorded, const CaseOutcome& outcome, Report& report);

/// The same of the best cases that left no traces and were predicted by shardlab's own executor: their plans are lowered again and
/// simulated. A few cases, of plans that a page has room for; none of `damaged` (ids), whose traces or plan are there and cannot be
/// joined: a report speaks of what ran.
void add_simulated(Report& report, const std::set<std::string>& damaged);

/// The cases that a reader looks at first, the fastest before the others, then the smallest.
std::vector<size_t> first_looked_at(const Report& report, size_t most);

/// Adds the YAML of the cases that are looked at first.
void add_yaml(Report& report);

}  // namespace shardlab::cli
