#include "reports/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "plan/base/values.h"
#include "plan/keys.h"

namespace shardlab::reports {

namespace {

constexpr std::array<std::string_view, 4> kDefaultMetrics{"step_s", "peak_bytes", "wire_bytes", "loss_last"};
constexpr double kStandardErrors = 3;
/// (p90 - p10) of a normal distribution in standard deviations, and the standard error of a median in those of a mean.
constexpr double kP90ToP10 = 2.5631, kMedianOverMean = 1.2533;

/// Measured figures that repeats spread: parts of a step in seconds, or rates that follow from the step.
constexpr std::array<std::string_view, 6> kStepSeconds{"measured_step_s",         "measured_compute_s", "measured_exposed_comm_s",
                                                       "measured_exposed_copy_s", "unplanned_time_s",   "measured_s_to_loss"};
constexpr std::array<std::string_view, 2> kStepRates{"measured_tokens_per_s", "measured_mfu"};
/// Measured figures of which no spread is recorded.
constexpr std::array<std::string_view, 5> kUnrecorded{"energy_j", "unplanned_memory_bytes", "resident_bytes", "recorder_overhead_s",
                                                      "measured_bubble_fraction"};

template <size_t N>
bool is_among(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

std::optional<double> number_in(const Value& value) {
  if (const auto* whole = std::get_if<int64_t>(&value)) return static_cast<double>(*whole);
  if (const auto* real = std::get_if<double>(&value); real && std::isfinite(*real)) return *real;
  return std::nullopt;
}

/// The columns whose values are figures of a run: settings and words are compared as settings.
bool is_figure(const CaseColumn& column) {
  if (column.unit != Unit::kNone) return column.name != "parameters" && column.name != "recompute_budget_bytes";
  constexpr std::array<std::string_view, 15> kBare{"steps_to_loss",
                                                   "skipped_steps",
                                                   "rolled_back_steps",
                                                   "expert_reruns",
                                                   "staleness_mean",
                                                   "staleness_worst",
                                                   "loss_scale",
                                                   "expert_imbalance",
                                                   "expert_imbalance_last",
                                                   "expert_rank_imbalance",
                                                   "expert_rank_imbalance_last",
                                                   "expert_dropped",
                                                   "expert_dropped_last",
                                                   "expert_rank_imbalance_contiguous",
                                                   "expert_rank_imbalance_peak"};
  return is_among(kBare, column.name);
}

int better_way(const CaseColumn& column) {
  if (column.unit == Unit::kTokensPerSecond || column.name.ends_with("mfu")) return 1;
  if (column.name == "loss_scale" || column.name == "step_error_pct" || column.name == "loss_unigram" ||
      column.name == "target_loss")
    return 0;
  return -1;
}

double relative_step_error(const Measurement& m) {
  return m.step_spread / kP90ToP10 * kMedianOverMean / std::sqrt(std::max(1, m.repeats));
}

}  // namespace

std::span<const std::string_view> default_metrics() { return kDefaultMetrics; }

std::string_view name_of(Verdict verdict) {
  constexpr std::array<std::string_view, 6> kNames{"same", "noise", "better", "worse", "changed", "unsure"};
  return kNames[static_cast<size_t>(verdict)];
}

Result<Metric> metric_named(std::string_view name) {
  const auto figure = [](std::string_view column) {
    const CaseColumn* found = find_column(column);
    return found != nullptr && is_figure(*found) ? found : nullptr;
  };
  Metric metric{std::string(name), nullptr, figure(name), -1};
  if (metric.column == nullptr) {
    metric.measured = figure(fmt::format("measured_{}", name));
    metric.column = figure(fmt::format("predicted_{}", name));
    if (metric.column == nullptr) std::swap(metric.column, metric.measured);  // of the two only the measured one
  }
  if (metric.column == nullptr) {
    std::string words;
    for (const CaseColumn& column : case_columns())
      if (is_figure(column)) words += (words.empty() ? "" : " ") + std::string(column.name);
    return Error{ExitCode::kUsage,
                 fmt::format("`{}` is not a figure of results", name),
                 "a figure, or its name without measured_ and predicted_ (step_s, peak_bytes): " + words,
                 {}};
  }
  metric.better = better_way(*metric.column);
  return metric;
}

std::optional<Sample> sample_of(const CaseColumn& column, const CaseOutcome& outcome) {
  const auto value = number_in(column.get(outcome));
  if (!value) return std::nullopt;
  Sample sample{*value, 0.0};
  const bool seconds = is_among(kStepSeconds, column.name), rate = is_among(kStepRates, column.name);
  if (is_among(kUnrecorded, column.name)) sample.standard_error.reset();
  if ((seconds || rate) && outcome.measured) {
    const Measurement& m = *outcome.measured;
    const bool follows = rate || column.name == "measured_s_to_loss";  // proportional to the step, not a part of it
    if (m.samples < 3)
      sample.standard_error.reset();  // percentiles of one or two steps say nothing
    else
      sample.standard_error = relative_step_error(m) * (follows ? std::abs(*value) : m.step_s);
  }
  return sample;
}

double Change::relative() const {
  if (b == a) return 0;
  return a == 0 ? std::copysign(std::numeric_limits<double>::infinity(), b) : (b - a) / std::abs(a);
}

namespace {

Change judge(const Metric& metric, const CaseColumn& column, const Sample& a, const Sample& b) {
  Change change{column.name, column.unit, a.value, b.value, 0, Verdict::kSame};
  const bool known = a.standard_error && b.standard_error;
  if (known) change.noise = kStandardErrors * std::hypot(*a.standard_error, *b.standard_error);
  const double difference = change.difference();
  // Bytes and counts are exact. Other figures that read the same are the same to whoever reads them: sums in another order differ in
  // bits that mean nothing.
  const bool rounded = column.unit == Unit::kSeconds || column.unit == Unit::kNats || column.unit == Unit::kTokensPerSecond ||
                       column.unit == Unit::kFraction;
  if (difference == 0 || (rounded && human_text(a.value, column.unit) == human_text(b.value, column.unit))) return change;
  if (!known)
    change.verdict = Verdict::kUnsure;
  else if (std::abs(difference) <= change.noise)
    change.verdict = Verdict::kNoise;
  else if (metric.better == 0)
    change.verdict = Verdict::kChanged;
  else
    change.verdict = (difference > 0) == (metric.better > 0) ? Verdict::kBetter : Verdict::kWorse;
  return change;
}

}  // namespace

CaseFigures figures_of(const CaseOutcome& outcome, std::span<const Metric> metrics) {
  CaseFigures figures{outcome.case_id, outcome.config.name, case_title(outcome.config), outcome.reason, outcome.status, {}, {}};
  for (const Metric& metric : metrics) {
    figures.measured.push_back(metric.measured != nullptr ? sample_of(*metric.measured, outcome) : std::nullopt);
    figures.other.push_back(sample_of(*metric.column, outcome));
  }
  return figures;
}

std::optional<Change> change_of(const Metric& metric, size_t index, const CaseFigures& a, const CaseFigures& b) {
  if (a.measured[index] && b.measured[index]) return judge(metric, *metric.measured, *a.measured[index], *b.measured[index]);
  if (a.other[index] && b.other[index]) return judge(metric, *metric.column, *a.other[index], *b.other[index]);
  return std::nullopt;
}

std::optional<Change> change_of(const Metric& metric, const CaseOutcome& a, const CaseOutcome& b) {
  return change_of(metric, 0, figures_of(a, {&metric, 1}), figures_of(b, {&metric, 1}));
}

std::vector<std::string> differing_keys(const Case& a, const Case& b) {
  std::vector<std::string> keys;
  for (const CaseKey& key : case_keys()) {
    if (key.get == nullptr || key.path == "name") continue;
    const std::string left = key.get(a), right = key.get(b);
    if (left != right)
      keys.push_back(fmt::format("{} {} -> {}", key.path, left.empty() ? "none" : left, right.empty() ? "none" : right));
  }
  return keys;
}

MedianChange median_change(std::vector<double> changes) {
  MedianChange result;
  if (changes.empty()) return result;
  std::ranges::sort(changes);
  const size_t n = changes.size();
  result.median = n % 2 == 1 ? changes[n / 2] : (changes[n / 2 - 1] + changes[n / 2]) / 2;
  // The interval from the (k+1)-th smallest to the (k+1)-th largest misses the median with 2 P(X <= k), X binomial(n, 1/2).
  double log_term = -static_cast<double>(n) * std::log(2.0), below = 0;
  int64_t k = -1;
  for (size_t i = 0; 2 * i < n; ++i) {
    below += std::exp(log_term);
    if (2 * below > 0.05) break;
    k = static_cast<int64_t>(i);
    log_term += std::log(static_cast<double>(n - i) / static_cast<double>(i + 1));
  }
  if (k >= 0) result.interval = {{changes[static_cast<size_t>(k)], changes[n - 1 - static_cast<size_t>(k)]}};
  return result;
}

bool Threshold::crossed(const Change& change) const {
  if (change.verdict == Verdict::kNoise) return false;  // of two that read the same the exact difference counts
  const double way = direction * (relative ? change.relative() : change.difference());
  return way > limit;
}

Result<Threshold> parse_threshold(std::string_view text) {
  const auto refuse = [&](std::string why) {
    return Error{ExitCode::kUsage,
                 fmt::format("--fail-if {}: {}", text, why),
                 "write METRIC:CHANGE, as step_s:+5%, tokens_per_s:-3%, peak_bytes:+1Mi or wire_bytes:0",
                 {}};
  };
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return refuse("there is no `:` between metric and change");
  auto metric = metric_named(text.substr(0, colon));
  if (!metric.ok()) return metric.error();
  Threshold threshold{std::string(text), std::move(*metric), 0, false, 0};
  std::string_view change = text.substr(colon + 1);
  if (change.starts_with('+') || change.starts_with('-')) {
    threshold.direction = change.front() == '+' ? 1 : -1;
    change.remove_prefix(1);
  }
  threshold.relative = change.ends_with('%');
  if (threshold.relative) change.remove_suffix(1);
  const auto number = parse_number(change);
  if (!number || *number < 0 || change.starts_with('+')) return refuse(fmt::format("`{}` is no number", change));
  threshold.limit = threshold.relative ? *number / 100 : *number;
  if (threshold.direction == 0) {
    if (threshold.metric.better == 0) return refuse(fmt::format("{} has no worse direction", threshold.metric.name));
    threshold.direction = -threshold.metric.better;
  }
  return threshold;
}

Pairing pair_up(std::span<const CaseFigures> a, std::span<const CaseFigures> b) {
  constexpr size_t kNone = SIZE_MAX;
  std::vector<size_t> partner_of_a(a.size(), kNone), partner_of_b(b.size(), kNone);
  std::unordered_map<std::string_view, size_t> by_id;
  for (size_t j = 0; j < b.size(); ++j) by_id.emplace(b[j].case_id, j);
  for (size_t i = 0; i < a.size(); ++i)
    if (const auto found = by_id.find(a[i].case_id); found != by_id.end() && partner_of_b[found->second] == kNone) {
      partner_of_a[i] = found->second;
      partner_of_b[found->second] = i;
    }
  // By name, where one case of either side has it.
  struct Named {
    size_t a = 0, b = 0;
    int in_a = 0, in_b = 0;
  };
  std::unordered_map<std::string_view, Named> by_name;
  for (size_t i = 0; i < a.size(); ++i)
    if (partner_of_a[i] == kNone && !a[i].name.empty()) by_name[a[i].name].a = i, ++by_name[a[i].name].in_a;
  for (size_t j = 0; j < b.size(); ++j)
    if (partner_of_b[j] == kNone && !b[j].name.empty()) by_name[b[j].name].b = j, ++by_name[b[j].name].in_b;
  Pairing pairing;
  for (size_t i = 0; i < a.size(); ++i) {
    if (partner_of_a[i] != kNone) {
      pairing.pairs.push_back({i, partner_of_a[i], false});
      continue;
    }
    const auto found = by_name.find(a[i].name);
    if (found != by_name.end() && found->second.in_a == 1 && found->second.in_b == 1) {
      pairing.pairs.push_back({i, found->second.b, true});
      partner_of_b[found->second.b] = i;
    } else {
      pairing.only_a.push_back(i);
    }
  }
  for (size_t j = 0; j < b.size(); ++j)
    if (partner_of_b[j] == kNone) pairing.only_b.push_back(j);
  return pairing;
}

}  // namespace shardlab::reports
