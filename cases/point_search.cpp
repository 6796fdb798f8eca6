#include "cases/point_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cases/analytic_case.h"

namespace shardlab::cases {
namespace {

std::optional<double> step_of(const CaseOutcome& outcome) {
  if (outcome.status != Status::kOk) return std::nullopt;
  if (outcome.measured) return outcome.measured->step_s;
  return outcome.predicted ? std::optional(outcome.predicted->step_s) : std::nullopt;
}

}  // namespace

bool estimates_first(const Search& search) { return search.kind == SearchKind::kHalving || search.kind == SearchKind::kGoal; }

Result<void> check_search(const Search& search, const std::string& file, Resolution resolution, bool sharded) {
  if (!estimates_first(search)) return {};
  if (resolution == Resolution::kAnalytic)
    return Error{
        ExitCode::kUsage,
        fmt::format("search {} needs the resolution segments or timeline: it orders the points by their analytic estimates, "
                    "and then runs the best",
                    name_of(search.kind)),
        "set resolution: segments or timeline, or search: grid or random", Problems(file).where(search.mark)};
  if (sharded)
    return refusal(fmt::format("--shard with search {}, which compares all points", name_of(search.kind)),
                   "leave --shard out, or use search: grid or random");
  return {};
}

Result<PointSearch> PointSearch::begin(const Search& search, std::span<const Point> points, RunDirectory& directory,
                                       const std::vector<std::string>& versions) {
  PointSearch made;
  AnalyticCaseRunner runner;
  BatchSink sink(directory, versions.back());
  std::vector<Ranked> ranked;
  for (size_t i = 0; i < points.size(); ++i) {
    if (points[i].refusal) {
      made.points_.push_back(points[i]);
      continue;
    }
    CaseOutcome outcome = runner.run(points[i], Mode::kSimulate);
    outcome.case_id = points[i].id;
    outcome.program_version = versions.back();
    if (outcome.status == Status::kOk) ranked.push_back({i, outcome.predicted->step_s});
    if (outcome.status == Status::kRefused) ++made.unknown_, made.reasons_.add(outcome.reason, outcome.config.name);
    const auto known = [&](const std::string& v) { return sink.recorded(outcome.case_id, v).has_value(); };
    if (std::ranges::none_of(versions, known)) sink.append(outcome);
  }
  sink.flush();
  if (ranked.empty() && made.unknown_ > 0)
    return refusal(fmt::format("search {}: no point has an estimate: {}", name_of(search.kind), made.reasons_.list().front().text),
                   "use search: grid or random, which need none");
  rank(ranked);
  made.estimated_ = ranked.size();
  if (search.kind == SearchKind::kHalving) ranked.resize(survivors(ranked.size(), search.keep));
  made.refused_ = made.points_.size();
  for (const Ranked& r : ranked) made.points_.push_back(points[r.place]);
  if (search.kind == SearchKind::kGoal) made.goal_.emplace(std::move(ranked), search.margin);
  return made;
}

std::function<bool(const CaseOutcome&)> PointSearch::enough() {
  if (!goal_) return {};
  return [this, left = refused_](const CaseOutcome& outcome) mutable {
    if (left > 0) return --left, false;
    return goal_->ran(step_of(outcome));
  };
}

std::string PointSearch::conclusion() const {
  std::string said = goal_ ? "search goal: " + goal_->reason()
                           : fmt::format("search halving: {} of {} points went on, the fastest by estimate",
                                         points_.size() - refused_, estimated_);
  if (unknown_ > 0)
    said += fmt::format("; {} points were not run, as they have no estimate: {}", unknown_, reasons_.list().front().text);
  return said;
}

}  // namespace shardlab::cases
