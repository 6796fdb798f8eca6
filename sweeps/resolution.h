// The resolution of the simulator at which a sweep is predicted.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "sweeps/sweep.h"

namespace shardlab::sweeps {

/// timeline: the plan of each case is lowered and its events are simulated. segments: the same, by whole stretches of segments and
/// one rank a stage, for plans of many micro-batches: the same figures, no trace. analytic: closed forms with no plan, for grids of
/// many points and for other frameworks than shardlab.
enum class Resolution : uint8_t { kTimeline, kSegments, kAnalytic };
std::string_view name_of(Resolution resolution);  ///< "timeline", "segments", "analytic"
std::optional<Resolution> resolution_named(std::string_view name);

/// The resolution that the file names; kTimeline if it names none.
Resolution resolution_of(const Sweep& sweep);

/// Whether expressions of the file decide on points: `when` and `constraints`.
bool has_rules(const Sweep& sweep);

/// Whether the file or the command line sets the key with this path ("train.precision") for some point; `auto` is no value.
bool says(const Sweep& sweep, std::string_view path);

/// The points of `sweep`, as `expand(sweep)`. Under kAnalytic no plan is made: whether a layout is legal is for the estimate to
/// say, and what this version does not execute is not refused for that.
Result<Expansion> expand(const Sweep& sweep, Resolution resolution);

/// The size of an expanded sweep.
struct ExpansionCounts {
  int64_t combinations = 0;  ///< of axes and zip blocks
  int64_t excluded = 0, included = 0, duplicates = 0;
  int64_t points = 0, refused = 0;
  int64_t runnable() const { return points - refused; }
};

/// The points of `expand`, each handed to `visit` as it is made, in order, and none of them kept: a million points take the memory
/// of their ids. `visit` returns false to end it. An expression that cannot be evaluated is found at the point where it cannot.
Result<ExpansionCounts> expand_each(const Sweep& sweep, Resolution resolution, const std::function<bool(Point&&)>& visit);

/// Evaluates the rules of the sweep (when, exclude, constraints) at every point, and makes no points: the error is an expression that cannot be
/// evaluated somewhere. Points that differ in their names only are each counted, and none is refused.
Result<ExpansionCounts> check_rules(const Sweep& sweep);

}  // namespace shardlab::sweeps
