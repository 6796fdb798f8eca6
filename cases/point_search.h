// The points that a sweep by halving or with a goal runs, fastest by estimate first, and when those were enough.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cases/namespaces.h"
#include "plan/base/result.h"
#include "plan/outcome.h"
#include "plan/reasons.h"
#include "reports/store.h"
#include "sweeps/resolution.h"
#include "sweeps/search.h"
#include "sweeps/sweep.h"

namespace shardlab::cases {

/// Whether a search estimates every point before it runs some.
bool estimates_first(const sweeps::Search& search);

/// Refuses a search whose estimate is all that the sweep asks for, and a part of a search that compares all points. `file` is the
/// sweep's.
Result<void> check_search(const sweeps::Search& search, const std::string& file, sweeps::Resolution resolution, bool sharded);

class PointSearch {
 public:
  /// Estimates all points. Estimates are saved as rows of the last of `versions`, but for points that one of the versions has a row of.
  /// Points that do not fit by estimate, or that have none, are not run. Refuses a search in which no point has an estimate, as on a
  /// machine that is not calibrated.
  static Result<PointSearch> begin(const sweeps::Search& search, std::span<const sweeps::Point> points,
                                   reports::RunDirectory& directory, const std::vector<std::string>& versions);

  /// In the order in which they are to be run. Refused points come first: they take no time.
  std::span<const sweeps::Point> points() const { return points_; }
  /// To be told of the outcome of each of the points, in order; true when the others need not run. Empty where all do.
  /// Valid while this object stays where it is.
  std::function<bool(const CaseOutcome&)> enough();
  /// What was run of how many, and why no more.
  std::string conclusion() const;

 private:
  PointSearch() = default;
  std::vector<sweeps::Point> points_;
  std::optional<sweeps::Goal> goal_;
  size_t refused_ = 0, estimated_ = 0,
         unknown_ = 0;  ///< of all points: by the sweep, with an estimate that fits, without an estimate
  Reasons reasons_;     ///< of those without
};

}  // namespace shardlab::cases
