// How far a predicted step time can be trusted: an interval learnt from the errors on other people's runs.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "simulator/estimator/validate/validate.h"

namespace shardlab::simulator::validation {

/// Error of one prediction: the logarithm of measured over predicted step time.
struct Residual {
  std::string source;
  double log_ratio = 0;
};

/// Residuals of the rows that have both times.
std::vector<Residual> residuals_of(std::span<const ScoredRow> rows);

/// Intervals of 90 % around predicted step times.
///
/// Formula: [p e^a, p e^b] around the prediction p, where a and b are the 5 % and the 95 % quantile of the log residuals of
///   all rows that do not come from the row's own source. Each source weighs the square root of its number of rows: rows of one
///   source share their errors, so many of them say less than equally many sources would, and yet more than one row.
/// Units: seconds.
/// Source: the residuals of the published sets; leaving the own source out is what makes the coverage one of unseen clusters.
/// Valid when: at least three other sources are there; else there is no interval.
class Intervals {
 public:
  explicit Intervals(std::vector<Residual> residuals) : residuals_(std::move(residuals)) {}

  /// Low and high seconds around `step_s` of a row of `source`.
  std::optional<std::pair<double, double>> around(double step_s, const std::string& source) const;

 private:
  std::vector<Residual> residuals_;
};

/// Sets `low_s` and `high_s` of every row with a prediction.
void add_intervals(std::span<ScoredRow> rows, const Intervals& intervals);

}  // namespace shardlab::simulator::validation
