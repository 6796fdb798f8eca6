#include "simulator/estimator/validate/interval.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace shardlab::simulator::validation {
namespace {

constexpr double kLow = 0.05, kHigh = 0.95;
constexpr size_t kFewestSources = 3;

struct Weighted {
  double value = 0, weight = 0;
};

/// The smallest value at which the weight up to and including it reaches the share `q` of the whole. `sorted` by value, not empty.
double quantile(std::span<const Weighted> sorted, double q) {
  double whole = 0, sum = 0;
  for (const Weighted& w : sorted) whole += w.weight;
  for (const Weighted& w : sorted)
    if ((sum += w.weight) >= q * whole) return w.value;
  return sorted.back().value;
}

}  // namespace

std::vector<Residual> residuals_of(std::span<const ScoredRow> rows) {
  std::vector<Residual> residuals;
  for (const ScoredRow& row : rows)
    if (const auto ratio = row.ratio(); ratio && *ratio > 0) residuals.push_back({row.source(), -std::log(*ratio)});
  return residuals;
}

std::optional<std::pair<double, double>> Intervals::around(double step_s, const std::string& source) const {
  std::map<std::string, int64_t> counts;
  for (const Residual& r : residuals_)
    if (r.source != source) ++counts[r.source];
  if (counts.size() < kFewestSources) return std::nullopt;
  std::vector<Weighted> others;
  for (const Residual& r : residuals_)
    if (r.source != source) others.push_back({r.log_ratio, 1 / std::sqrt(static_cast<double>(counts[r.source]))});
  std::sort(others.begin(), others.end(), [](const Weighted& a, const Weighted& b) { return a.value < b.value; });
  return std::pair{step_s * std::exp(quantile(others, kLow)), step_s * std::exp(quantile(others, kHigh))};
}

void add_intervals(std::span<ScoredRow> rows, const Intervals& intervals) {
  std::map<std::string, std::optional<std::pair<double, double>>> of_source;  // around one second
  for (ScoredRow& row : rows) {
    if (!row.prediction.ok()) continue;
    const auto [entry, fresh] = of_source.try_emplace(row.source());
    if (fresh) entry->second = intervals.around(1.0, row.source());
    if (!entry->second) continue;
    row.low_s = row.prediction->step_s * entry->second->first;
    row.high_s = row.prediction->step_s * entry->second->second;
  }
}

}  // namespace shardlab::simulator::validation
