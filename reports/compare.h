// Two sets of outcomes, case by case: what changed, by how much, and whether the change is more than noise.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "plan/outcome.h"
#include "reports/columns.h"
#include "reports/table.h"

namespace shardlab::reports {

/// A figure to compare: a numeric column, or a pair of columns of which the measured one is taken where both sides have it.
struct Metric {
  std::string name;                      ///< "step_s", or a column's name
  const CaseColumn* measured = nullptr;  ///< of a pair: "measured_step_s"; else null
  const CaseColumn* column = nullptr;    ///< the column, or the predicted one of the pair
  /// Which way is better: -1 down (time, bytes, losses), +1 up (rates, MFU), 0 neither.
  int better = -1;
};

/// The metric called `name`: a column of results.csv that holds numbers, or such a name without `measured_` and `predicted_`.
Result<Metric> metric_named(std::string_view name);

/// The metrics that are compared where none is named: step_s, peak_bytes, wire_bytes, loss_last.
std::span<const std::string_view> default_metrics();

/// One figure of one case, with what is known of its noise.
struct Sample {
  double value = 0;
  /// Standard error, in the metric's unit; 0: the figure is exact; nothing: its spread is not recorded.
  std::optional<double> standard_error = 0.0;
};

/// The figure of an outcome, nothing where it has none. `column` is one of the metric's two.
///
/// A measured time is the median of steps, whose (p90 - p10) / median is recorded. Formula: sigma = spread * step / 2.563 (a normal
/// distribution's), standard error of a median = 1.2533 sigma / sqrt(repeats). The steps of one repeat share their surroundings, so
/// they count as one. Parts of a step (compute, exposed communication) are as uncertain as the step, in seconds. Predictions, bytes
/// and losses are exact: the same program gives the same figure.
std::optional<Sample> sample_of(const CaseColumn& column, const CaseOutcome& outcome);

enum class Verdict : uint8_t {
  kSame,     ///< equal; of times, rates and losses also what reads the same in four digits
  kNoise,    ///< a difference within three standard errors
  kBetter,   ///< a difference beyond noise, in the better direction
  kWorse,    ///< in the other
  kChanged,  ///< beyond noise, of a metric without a direction
  kUnsure,   ///< a difference of figures whose spread is not recorded
};
std::string_view name_of(Verdict verdict);  ///< "same", "noise", "better", "worse", "changed", "unsure"

/// One metric of a pair of cases.
struct Change {
  std::string_view column;  ///< name of the column that was compared
  Unit unit = Unit::kNone;
  double a = 0, b = 0;
  double noise = 0;  ///< three standard errors of b - a
  Verdict verdict = Verdict::kSame;

  double difference() const { return b - a; }
  /// (b - a) / |a|; infinite where a is 0 and b is not.
  double relative() const;
};

/// The change of a metric from one outcome to another; nothing where either has no such figure.
std::optional<Change> change_of(const Metric& metric, const CaseOutcome& a, const CaseOutcome& b);

/// "layout.zero 1 -> 2": the keys in which two cases differ, their names left out.
std::vector<std::string> differing_keys(const Case& a, const Case& b);

/// The middle of the relative changes of many cases. The interval covers the true median with at least 95 % probability whatever
/// the distribution (order statistics of a binomial), if cases are independent; nothing below six cases, where no such interval is.
struct MedianChange {
  double median = 0;
  std::optional<std::pair<double, double>> interval;
};
MedianChange median_change(std::vector<double> relative_changes);

/// A bound on a change, "step_s:+5%" or "peak_bytes:+1Mi": crossed by a change in that direction that is greater, and beyond noise.
/// Without a sign the direction is the metric's worse one.
struct Threshold {
  std::string text;
  Metric metric;
  double limit = 0;       ///< above or equal 0; of `a` where `relative`
  bool relative = false;  ///< written with %
  int direction = 1;      ///< +1: rises are bounded, -1: falls

  bool crossed(const Change& change) const;
};
Result<Threshold> parse_threshold(std::string_view text);

/// The figures of one outcome that a comparison of many needs, without the case.
struct CaseFigures {
  std::string case_id, name, title, reason;
  Status status = Status::kOk;
  std::vector<std::optional<Sample>> measured, other;  ///< by metric: of `Metric::measured` and `Metric::column`
};
CaseFigures figures_of(const CaseOutcome& outcome, std::span<const Metric> metrics);

/// The change of metric `index` of the list that `figures_of` was given.
std::optional<Change> change_of(const Metric& metric, size_t index, const CaseFigures& a, const CaseFigures& b);

/// Which cases belong together: those of one id; then, of those left, those of one name that is unique on either side.
struct Pairing {
  struct Pair {
    size_t a = 0, b = 0;
    bool by_name = false;  ///< their settings differ
  };
  std::vector<Pair> pairs;  ///< in the order of side a
  std::vector<size_t> only_a, only_b;
};
Pairing pair_up(std::span<const CaseFigures> a, std::span<const CaseFigures> b);

}  // namespace shardlab::reports
