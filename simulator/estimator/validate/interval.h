// How far predictions can be trusted, learnt from the errors on other people's runs: the scales of analytic/doubt.h.
#pragma once

#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "simulator/estimator/analytic/doubt.h"
#include "simulator/estimator/validate/validate.h"

namespace shardlab::simulator::validation {

/// A prediction beside what was measured.
struct Observation {
  std::string source;
  double log_ratio = 0;  ///< logarithm of measured over predicted
  analytic::Doubt doubt;
};

std::vector<Observation> step_observations(std::span<const ScoredRow> rows);
/// Of the kind of bytes that was measured: live, or reserved.
std::vector<Observation> memory_observations(std::span<const ScoredRow> rows);

/// Learns the spread of one figure.
///
/// Scales: those that minimise the pinball loss of |log_ratio| at 90 %, every source of the same weight however many rows it has,
///   for rows of one source share their errors. What is unseen is looked up for each source among the others, so that the price of
///   an unseen framework is what it cost each source to be the first of its framework. Each scale is drawn to a value that is set
///   in advance (`prior` in interval.cpp): what the sources say little of stays there.
/// Multiplier: each source is predicted with the scales that the others give; the quantile of |log_ratio| over the spread, over
///   all rows with equal weight for each source. It is that of 96 %, because a further source is wanted in, of a dozen.
/// Source of the form: conformal prediction with groups, Lee, Barber and Willett 2023, arXiv:2306.06342.
/// Valid when: three sources are there at least; with fewer the spread has the priors.
class Learner {
 public:
  explicit Learner(std::vector<Observation> observations);

  /// The spread that all sources give, but for those in `without`.
  const analytic::Spread& without(const std::set<std::string>& sources);
  const analytic::Seen& seen() const { return seen_; }
  bool knows(const std::string& source) const { return rows_.contains(source); }
  analytic::LearntFigure all() { return {without({}), seen_}; }

 private:
  const analytic::Spread& scales(const std::set<std::string>& without);
  analytic::Spread fit(const std::set<std::string>& without) const;
  std::set<std::string> sources(const std::set<std::string>& without) const;

  std::map<std::string, std::vector<Observation>> rows_;  ///< by source
  analytic::Seen seen_;
  std::map<std::set<std::string>, analytic::Spread> scales_, spreads_;
};

/// What was learnt from all rows of the published sets.
analytic::Learnt learn(std::span<const ScoredRow> published);

/// Sets the interval of every row with a prediction, from what `published` rows of other sources teach.
void add_intervals(std::span<ScoredRow> rows, std::span<const ScoredRow> published);

}  // namespace shardlab::simulator::validation
