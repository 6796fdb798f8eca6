#include "simulator/estimator/validate/score.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace shardlab::simulator::validation {
namespace {

constexpr size_t kFewestLayouts = 3;  ///< below, a rank correlation says nothing

/// Rank of each value from 1; equal values share the mean of theirs.
std::vector<double> ranks_of(std::span<const double> values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t i, size_t j) { return values[i] < values[j]; });
  std::vector<double> ranks(values.size());
  for (size_t begin = 0, end; begin < order.size(); begin = end) {
    for (end = begin + 1; end < order.size() && values[order[end]] == values[order[begin]];) ++end;
    for (size_t i = begin; i < end; ++i) ranks[order[i]] = 0.5 * static_cast<double>(begin + 1 + end);
  }
  return ranks;
}

struct LabelledError {
  double error = 0;
  std::string row;
};

ErrorFigures figures_of(std::vector<LabelledError> errors) {
  ErrorFigures f;
  f.rows = static_cast<int64_t>(errors.size());
  if (errors.empty()) return f;
  const double n = static_cast<double>(errors.size());
  for (const LabelledError& e : errors) {
    f.bias += e.error / n;
    f.mean_absolute += std::fabs(e.error) / n;
    if (f.worst_row.empty() || std::fabs(e.error) > std::fabs(f.worst)) f.worst = e.error, f.worst_row = e.row;
  }
  const auto smaller = [](const LabelledError& a, const LabelledError& b) { return std::fabs(a.error) < std::fabs(b.error); };
  std::sort(errors.begin(), errors.end(), smaller);
  const size_t half = errors.size() / 2;
  const double upper = std::fabs(errors[half].error);
  f.median_absolute = errors.size() % 2 == 1 ? upper : 0.5 * (upper + std::fabs(errors[half - 1].error));
  return f;
}

std::string label(const ScoredRow& row) { return fmt::format("{}:{}", row.table->name, row.row().line); }

/// The identity of a job, as text: the columns that competing layouts share. The measured fabric belongs to it, because it tells
/// which cluster it was, on which day.
std::string job_of(const Run& run) {
  const RunShape& s = run.shape;
  return fmt::format("{} {} {} {} {} {} {} {} {} {} {} {}", run.profile, s.layers, s.hidden, s.heads, s.kv_heads, s.ffn, s.vocab,
                     s.experts, run.machine.id, run.devices, run.layout.seq_len, run.layout.tokens_per_step());
}

/// Measured and predicted step seconds of rows that have both.
struct StepPairs {
  std::vector<double> measured, predicted;
  void add(const ScoredRow& row) {
    measured.push_back(*row.row().run->measured.step_s);
    predicted.push_back(row.prediction->step_s);
  }
};

void rank_layouts(std::span<const ScoredRow* const> rows, Score& score) {
  std::map<std::string, StepPairs> jobs;
  for (const ScoredRow* row : rows)
    if (row->ratio()) jobs[job_of(*row->row().run)].add(*row);
  double weight = 0, rank = 0, loss = 0;
  for (const auto& [job, pairs] : jobs) {
    if (pairs.measured.size() < kFewestLayouts) continue;
    const auto correlation = rank_correlation(pairs.measured, pairs.predicted);
    if (!correlation) continue;
    const auto fastest = std::min_element(pairs.measured.begin(), pairs.measured.end());
    const auto chosen = std::min_element(pairs.predicted.begin(), pairs.predicted.end()) - pairs.predicted.begin();
    const double n = static_cast<double>(pairs.measured.size());
    ++score.jobs;
    weight += n;
    rank += n * *correlation;
    loss += n * (pairs.measured[static_cast<size_t>(chosen)] / *fastest - 1);
  }
  if (weight > 0) score.layout_rank = rank / weight, score.layout_loss = loss / weight;
}

/// Speed is compared as tokens a second and device, for step times of unlike batches rank themselves.
void rank_speeds(std::span<const ScoredRow* const> rows, Score& score) {
  std::vector<double> measured, predicted;
  for (const ScoredRow* row : rows) {
    if (!row->ratio()) continue;
    const Run& run = *row->row().run;
    const double work = static_cast<double>(run.layout.tokens_per_step()) / static_cast<double>(run.devices);
    measured.push_back(work / *run.measured.step_s);
    predicted.push_back(work / row->prediction->step_s);
  }
  if (measured.size() >= kFewestLayouts) score.rank = rank_correlation(measured, predicted);
}

void judge_fit(const ScoredRow& row, FitFigures& fit) {
  if (!row.prediction.ok() || !row.row().run->measured.fits) return;
  const std::optional<bool> predicted = row.prediction->fits();
  if (!predicted) return;
  const bool ran = *row.row().run->measured.fits;
  ++(*predicted ? (ran ? fit.fits_right : fit.fits_wrong) : (ran ? fit.oom_wrong : fit.oom_right));
}

/// Counts one interval; `width` is the sum until all are counted.
void cover(const analytic::Between& interval, double measured, Score::Coverage& coverage) {
  ++coverage.rows;
  coverage.width += std::sqrt(interval.high / interval.low) - 1;
  if (measured >= interval.low && measured <= interval.high) ++coverage.covered;
}

Score score_of(std::string name, std::span<const ScoredRow* const> rows) {
  Score score;
  score.group = std::move(name);
  score.rows = static_cast<int64_t>(rows.size());
  std::vector<LabelledError> step;
  std::array<std::vector<LabelledError>, kMemoryKinds> memory;
  for (const ScoredRow* row : rows) {
    if (!row->prediction.ok()) ++score.refused;
    if (const auto ratio = row->ratio()) {
      step.push_back({*ratio - 1, label(*row)});
      if (row->step) cover(*row->step, *row->row().run->measured.step_s, score.step_interval);
    }
    if (const auto ratio = row->memory_ratio()) {
      memory[static_cast<size_t>(row->row().run->measured.kind)].push_back({*ratio - 1, label(*row)});
      if (row->memory) cover(*row->memory, static_cast<double>(*row->row().run->measured.bytes), score.memory_interval);
    }
    judge_fit(*row, score.fit);
  }
  for (Score::Coverage* c : {&score.step_interval, &score.memory_interval})
    if (c->rows > 0) c->width /= static_cast<double>(c->rows);
  score.step = figures_of(std::move(step));
  for (size_t kind = 0; kind < kMemoryKinds; ++kind) score.memory[kind] = figures_of(std::move(memory[kind]));
  rank_speeds(rows, score);
  rank_layouts(rows, score);
  return score;
}

std::optional<double> share(int64_t part, int64_t whole) {
  if (whole == 0) return std::nullopt;
  return static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

std::optional<double> rank_correlation(std::span<const double> a, std::span<const double> b) {
  SHARDLAB_CHECK(a.size() == b.size(), "rank correlation of {} and {} values", a.size(), b.size());
  if (a.size() < 2) return std::nullopt;
  const std::vector<double> x = ranks_of(a), y = ranks_of(b);
  const double mean = 0.5 * static_cast<double>(a.size() + 1);
  double xy = 0, xx = 0, yy = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    xy += (x[i] - mean) * (y[i] - mean);
    xx += (x[i] - mean) * (x[i] - mean);
    yy += (y[i] - mean) * (y[i] - mean);
  }
  if (xx == 0 || yy == 0) return std::nullopt;
  return xy / std::sqrt(xx * yy);
}

std::optional<double> FitFigures::precision_fits() const { return share(fits_right, fits_right + fits_wrong); }
std::optional<double> FitFigures::precision_oom() const { return share(oom_right, oom_right + oom_wrong); }
std::optional<double> FitFigures::accuracy() const { return share(fits_right + oom_right, rows()); }

std::vector<Score> score_groups(std::span<const ScoredRow> rows, std::span<const std::string> by) {
  std::vector<std::string> names;
  std::map<std::string, std::vector<const ScoredRow*>> groups;
  for (const ScoredRow& row : rows) {
    std::string name = by.empty() ? row.table->name : "";
    for (const std::string& column : by) {
      const std::string field = column == "set" ? row.table->name : row.field(column);
      name += (name.empty() ? "" : " ") + (by.size() > 1 && column != "set" ? column + "=" + field : field);
    }
    auto& members = groups[name];
    if (members.empty()) names.push_back(name);
    members.push_back(&row);
  }
  std::vector<Score> scores;
  for (const std::string& name : names) scores.push_back(score_of(name, groups[name]));
  return scores;
}

Score score_all(std::span<const ScoredRow> rows, const std::string& name) {
  std::vector<const ScoredRow*> all;
  for (const ScoredRow& row : rows) all.push_back(&row);
  return score_of(name, all);
}

}  // namespace shardlab::simulator::validation
