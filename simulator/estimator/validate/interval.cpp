#include "simulator/estimator/validate/interval.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

namespace shardlab::simulator::validation {
namespace {

using analytic::Doubt;
using analytic::DoubtTerm;
using analytic::kDoubtTerms;
using analytic::Seen;
using analytic::Spread;

constexpr double kCovered = 0.9;      ///< of rows, by an interval
constexpr double kMultiplier = 0.96;  ///< quantile that the multiplier is
constexpr double kFewestSources = 3;
constexpr int kFewestBearers = 2;  ///< sources whose rows rest on a term, for its scale to be learnt
constexpr double kDraw = 0.003;    ///< loss, in logarithms of the ratio, of a scale that is 1 off its prior
constexpr double kFloor = 1e-3;    ///< no spread is thought to be smaller

/// Scales where nobody taught anything: a twentieth of compute, as devices and kernel tables differ; a third of any communication and
/// of waiting for a host; of state that is counted a hundredth, of activations a tenth, half of what an allocator holds besides; a
/// fifth of all reserved bytes where nobody measured what this framework makes its allocator do.
constexpr std::array<double, kDoubtTerms> kPrior{0.05, 0.3,  0.3,  0.3,  0.3,  0.3,  0.1,  0.01, 0.1, 0.5,
                                                 0.5,  0.05, 0.05, 0.05, 0.05, 0.05, 0.02, 0.1,  0.2};

/// 0, then steps of a quarter up to 1.1.
std::vector<double> candidates() {
  std::vector<double> values{0};
  for (double v = 0.01; v < 1.2; v *= 1.25) values.push_back(v);
  return values;
}

struct Weighted {
  double value = 0, weight = 0;
};

/// The smallest value at which the weight up to and including it reaches the share `q` of the whole. Not empty.
double quantile(std::vector<Weighted> list, double q) {
  std::sort(list.begin(), list.end(), [](const Weighted& a, const Weighted& b) { return a.value < b.value; });
  double whole = 0, sum = 0;
  for (const Weighted& w : list) whole += w.weight;
  for (const Weighted& w : list)
    if ((sum += w.weight) >= q * whole * (1 - 1e-12)) return w.value;
  return list.back().value;
}

/// Pinball loss of scales over rows: least where a share of kCovered of them lies within.
class Loss {
 public:
  /// All rows of a source, one after the other.
  void add(const Doubt& doubt, double error, double weight, const std::string& source) {
    Row& row = rows_.emplace_back();
    for (size_t i = 0; i < kDoubtTerms; ++i) {
      row.squares[i] = doubt.amounts[i] * doubt.amounts[i];
      if (row.squares[i] > 0 && last_[i] != source) ++bearers_[i], last_[i] = source;
    }
    row.error = error, row.weight = weight;
  }
  /// Whether several sources tell how far off a term is. What one alone shows need not hold for another.
  bool teaches(size_t term) const { return bearers_[term] >= kFewestBearers; }
  /// Puts the best of `values` for one term into `scales`, the others as they are; false if it stays.
  bool improve(size_t term, std::span<const double> values, std::array<double, kDoubtTerms>& scales) {
    for (Row& row : rows_) {
      row.rest = kFloor * kFloor;
      for (size_t i = 0; i < kDoubtTerms; ++i)
        if (i != term) row.rest += scales[i] * scales[i] * row.squares[i];
    }
    double least = HUGE_VAL, best = scales[term];
    for (const double value : values)
      if (const double loss = of(term, value); loss < least - 1e-12) least = loss, best = value;
    const bool moved = best != scales[term];
    scales[term] = best;
    return moved;
  }

 private:
  struct Row {
    std::array<double, kDoubtTerms> squares{};
    double error = 0, weight = 0, rest = 0;
  };
  double of(size_t term, double value) const {
    double loss = kDraw * std::fabs(value - kPrior[term]);
    for (const Row& row : rows_) {
      const double beyond = row.error - std::sqrt(row.rest + value * value * row.squares[term]);
      loss += row.weight * (beyond > 0 ? kCovered : kCovered - 1) * beyond;
    }
    return loss;
  }
  std::vector<Row> rows_;
  std::array<int, kDoubtTerms> bearers_{};
  std::array<std::string, kDoubtTerms> last_;
};

std::set<std::string> with(std::set<std::string> set, const std::string& one) {
  set.insert(one);
  return set;
}

Doubt looked_up(Doubt doubt, const Seen& seen, const std::set<std::string>& without) {
  seen.look_up(doubt, without);
  return doubt;
}

}  // namespace

std::vector<Observation> step_observations(std::span<const ScoredRow> rows) {
  std::vector<Observation> list;
  for (const ScoredRow& row : rows)
    if (const auto ratio = row.ratio(); ratio && *ratio > 0)
      list.push_back({row.source(), -std::log(*ratio), row.prediction->step_doubt});
  return list;
}

std::vector<Observation> memory_observations(std::span<const ScoredRow> rows) {
  std::vector<Observation> list;
  for (const ScoredRow& row : rows)
    if (const auto ratio = row.memory_ratio(); ratio && *ratio > 0)
      list.push_back({row.source(), -std::log(*ratio), row.prediction->doubt_of(row.row().run->measured.kind)});
  return list;
}

Learner::Learner(std::vector<Observation> observations) {
  for (Observation& o : observations) {
    seen_.add(o.doubt, o.source);
    rows_[o.source].push_back(std::move(o));
  }
}

std::set<std::string> Learner::sources(const std::set<std::string>& without) const {
  std::set<std::string> left;
  for (const auto& [source, rows] : rows_)
    if (!without.contains(source)) left.insert(source);
  return left;
}

Spread Learner::fit(const std::set<std::string>& without) const {
  Spread spread{.scales = kPrior};
  const std::set<std::string> teachers = sources(without);
  if (teachers.size() < kFewestSources) return spread;
  Loss loss;
  for (const std::string& source : teachers) {
    const std::vector<Observation>& rows = rows_.at(source);
    const double weight = 1 / static_cast<double>(rows.size() * teachers.size());
    for (const Observation& o : rows)
      loss.add(looked_up(o.doubt, seen_, with(without, source)), std::fabs(o.log_ratio), weight, source);
  }
  const std::vector<double> values = candidates();
  constexpr int kMostRounds = 25;
  bool moved = true;
  for (int round = 0; moved && round < kMostRounds; ++round) {
    moved = false;
    for (size_t term = 0; term < kDoubtTerms; ++term)
      if (loss.teaches(term)) moved = loss.improve(term, values, spread.scales) || moved;
  }
  return spread;
}

const Spread& Learner::scales(const std::set<std::string>& without) {
  const auto found = scales_.find(without);
  return found != scales_.end() ? found->second : scales_.emplace(without, fit(without)).first->second;
}

const Spread& Learner::without(const std::set<std::string>& left_out) {
  std::set<std::string> without;  // sources that are not here make no difference
  for (const std::string& source : left_out)
    if (knows(source)) without.insert(source);
  if (const auto found = spreads_.find(without); found != spreads_.end()) return found->second;
  Spread spread = scales(without);
  const std::set<std::string> teachers = sources(without);
  std::vector<Weighted> over;
  for (const std::string& source : teachers) {
    const std::set<std::string> others = with(without, source);
    const std::vector<Observation>& rows = rows_.at(source);
    for (const Observation& o : rows) {
      const double expected = std::max(kFloor, scales(others).of(looked_up(o.doubt, seen_, others)));
      over.push_back({std::fabs(o.log_ratio) / expected, 1 / static_cast<double>(rows.size())});
    }
  }
  // A source that is not among the teachers is no surer than they are.
  if (teachers.size() >= kFewestSources) spread.multiplier = std::max(1.0, quantile(std::move(over), kMultiplier));
  return spreads_.emplace(without, spread).first->second;
}

analytic::Learnt learn(std::span<const ScoredRow> published) {
  return {Learner(step_observations(published)).all(), Learner(memory_observations(published)).all()};
}

void add_intervals(std::span<ScoredRow> rows, std::span<const ScoredRow> published) {
  Learner step(step_observations(published)), memory(memory_observations(published));
  const auto around = [](Learner& learner, const ScoredRow& row, double value, const Doubt& doubt) {
    const double spread = learner.without({row.source()}).of(looked_up(doubt, learner.seen(), {row.source()}));
    return analytic::Between::around(value, std::max(kFloor, spread));
  };
  for (ScoredRow& row : rows) {
    if (!row.prediction.ok()) continue;
    const Prediction& p = *row.prediction;
    row.step = around(step, row, p.step_s, p.step_doubt);
    const MemoryKind kind = row.row().run->measured.kind;
    row.memory = around(memory, row, static_cast<double>(p.of(kind)), p.doubt_of(kind));
  }
}

}  // namespace shardlab::simulator::validation
