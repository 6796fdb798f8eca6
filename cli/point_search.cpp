#include "cli/point_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "cli/analytic_case.h"

namespace shardlab::cli {
namespace {

/// Points with an estimate that fits, the fastest first.
std::vector<Ranked> estimate_all(std::span<const Point> points, RunDirectory& directory, const std::vector<std::string>& versions) {
  AnalyticCaseRunner runner;
  BatchSink sink(directory, versions.back());
  std::vector<Ranked> ranked;
  for (size_t i = 0; i < points.size(); ++i) {
    if (points[i].refusal) continue;
    CaseOutcome outcome = runner.run(points[i], Mode::kSimulate);
    outcome.case_id = points[i].id;
    outcome.program_version = versions.back();
    if (outcome.status == Status::kOk) ranked.push_back({i, outcome.predicted->step_s});
    const auto known = [&](const std::string& v) { return directory.store().recorded(outcome.case_id, v).has_value(); };
    if (std::ranges::none_of(versions, known)) sink.append(outcome);
  }
  sink.flush();
  rank(ranked);
  return ranked;
}

std::optional<double> step_of(const CaseOutcome& outcome) {
  if (outcome.status != Status::kOk) return std::nullopt;
  if (outcome.measured) return outcome.measured->step_s;
  return outcome.predicted ? std::optional(outcome.predicted->step_s) : std::nullopt;
}

}  // namespace

bool estimates_first(const Search& search) { return search.kind == SearchKind::kHalving || search.kind == SearchKind::kGoal; }

Result<void> check_search(const Search& search, Resolution resolution, bool sharded) {
  if (!estimates_first(search)) return {};
  if (resolution == Resolution::kAnalytic)
    return refusal(fmt::format("search {} at the analytic resolution, which is the estimate that it begins with", name_of(search.kind)),
                   "use search: grid or random, or --resolution segments or timeline");
  if (sharded)
    return refusal(fmt::format("--shard of a search by {}, which compares all points", name_of(search.kind)),
                   "leave --shard out, or use search: grid or random");
  return {};
}

PointSearch::PointSearch(const Search& search, std::span<const Point> points, RunDirectory& directory,
                         const std::vector<std::string>& versions) {
  std::vector<Ranked> ranked = estimate_all(points, directory, versions);
  estimated_ = ranked.size();
  if (search.kind == SearchKind::kHalving) ranked.resize(survivors(ranked.size(), search.keep));
  std::ranges::copy_if(points, std::back_inserter(points_), [](const Point& point) { return point.refusal.has_value(); });
  refused_ = points_.size();
  for (const Ranked& r : ranked) points_.push_back(points[r.place]);
  if (search.kind == SearchKind::kGoal) goal_.emplace(std::move(ranked), search.margin);
}

std::function<bool(const CaseOutcome&)> PointSearch::enough() {
  if (!goal_) return {};
  return [this, left = refused_](const CaseOutcome& outcome) mutable {
    if (left > 0) return --left, false;
    return goal_->ran(step_of(outcome));
  };
}

std::string PointSearch::conclusion() const {
  if (goal_) return "search goal: " + goal_->reason();
  return fmt::format("search halving: {} of {} points went on, the fastest by estimate", points_.size() - refused_, estimated_);
}

}  // namespace shardlab::cli
