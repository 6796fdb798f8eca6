// How a sweep goes through its points: all of them, a sample, or only those that can still be the fastest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sweeps/sweep.h"
#include "sweeps/yaml.h"

namespace shardlab::sweeps {

/// grid: every point. random: a sample of them. halving: all are estimated, and the fastest by estimate go on to what the sweep asks
/// for. goal: they go on one by one, the fastest by estimate first, until no other can be faster.
enum class SearchKind : uint8_t { kGrid, kRandom, kHalving, kGoal };
std::string_view name_of(SearchKind kind);
std::optional<SearchKind> search_kind_named(std::string_view name);

struct Search {
  SearchKind kind = SearchKind::kGrid;
  int64_t count = 0;     ///< of random: points of the axes
  int64_t seed = 1;      ///< of random
  double keep = 0.25;    ///< of halving: share of the estimated points that go on
  double margin = 0.05;  ///< of goal: share by which an estimate may be too slow
  Mark mark;             ///< of the file's `search`
};

/// The file's; kGrid where it says nothing.
const Search& search_of(const Sweep& sweep);

/// The numbers 0 to n - 1 in an order that the seed alone decides.
std::vector<int64_t> shuffled(int64_t n, int64_t seed);

/// A point's place in the sweep, and its step as a cheap prediction has it.
struct Ranked {
  size_t place = 0;
  double step_s = 0;
};

/// The fastest first; of equal ones the first of the sweep.
void rank(std::vector<Ranked>& points);

/// How many of n points go on: at least one, where there is one.
size_t survivors(size_t n, double keep);

/// When a search that runs the ranked points one by one may end: what is left cannot be faster than the best by more than an
/// estimate may be wrong.
class Goal {
 public:
  /// `ranked` as `rank` leaves them; `margin` as in `Search`.
  Goal(std::vector<Ranked> ranked, double margin) : ranked_(std::move(ranked)), margin_(margin) {}

  /// The next point of the ranking was run; nothing where it gave no step. True when the search may end.
  bool ran(std::optional<double> step_s);
  bool reached() const;
  /// "the best of 3 points takes 12.3 ms, each of the 61 others at least 14.1 ms: its estimate less 5 %"
  std::string reason() const;
  size_t run() const { return run_; }

 private:
  double least_of_rest() const { return ranked_[run_].step_s * (1 - margin_); }
  std::vector<Ranked> ranked_;
  double margin_;
  size_t run_ = 0;
  std::optional<double> best_;
};

}  // namespace shardlab::sweeps
