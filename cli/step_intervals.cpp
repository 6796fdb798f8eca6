#include "cli/step_intervals.h"

#include <algorithm>
#include <utility>

#include "cases/analytic_case.h"
#include "cli/next_steps.h"
#include "reports/columns.h"

namespace shardlab::cli {
namespace {

std::optional<analytic::Between> interval_of(AnalyticCaseRunner& runner, const CaseOutcome& o) {
  if (o.status != Status::kOk || predicted_by(o) != "analytic") return std::nullopt;
  const auto point = point_of(o);
  if (!point) return std::nullopt;
  return runner.step_between(*point, o.predicted->step_s);
}

}  // namespace

ExtraColumn step_low_column() {
  return {"step_low_s", Unit::kSeconds, "step, low", "nine of ten runs like it take from this to step_high_s", {}};
}

ExtraColumn step_high_column() {
  return {"step_high_s", Unit::kSeconds, "step, high", "nine of ten runs like it take from step_low_s to this", {}};
}

void add_step_intervals(Report& report) {
  ExtraColumn low = step_low_column(), high = step_high_column();
  AnalyticCaseRunner runner;
  bool any = false;
  for (const CaseOutcome& o : report.cases) {
    const auto between = interval_of(runner, o);
    any |= between.has_value();
    low.values.push_back(between ? Value(between->low) : Value());
    high.values.push_back(between ? Value(between->high) : Value());
  }
  if (!any) return;
  report.extra.push_back(std::move(low));
  report.extra.push_back(std::move(high));
}

}  // namespace shardlab::cli
