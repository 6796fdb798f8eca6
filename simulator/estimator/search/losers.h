// Keeps account of the points that are not among the best: how many of each class, and the nearest of them.
#pragma once

#include <vector>

#include "simulator/estimator/search/search.h"

namespace shardlab::simulator::search {

/// Axes in which two points differ.
int distance(const Point& a, const Point& b);

/// The reason by which a layout that fits loses, as a class of one point.
Loser beaten_by(const Candidate& best, const Candidate& candidate, Objective objective);
/// Counts one more loser among the classes of a list.
void count_loser(std::vector<Loser>& list, const Loser& loser);

class Losers {
 public:
  explicit Losers(Objective objective) : objective_(objective) {}

  void illegal(analytic::Refusal refusal, int64_t points, const Point& example);
  void undivided(const Point& example);
  /// `bytes` of a point, or, as a bound, which all of `points` need at least.
  void too_large(int64_t points, const Point& example, int64_t bytes, bool is_bound);
  void bounded(int64_t points, const Point& example, double least_s);
  /// `seconds` of a step of a point, or, as a bound, which all of `points` take at least.
  void late(int64_t points, const Point& example, double seconds, bool is_bound);
  /// A layout that may not fit.
  void tight(const Candidate& candidate);
  /// A layout that fits, when `best` is the best known.
  void beaten(const Candidate& candidate, const Candidate& best);
  /// From now on the examples of illegal layouts are the ones nearest to `best`.
  void new_best(const Point& best);

  /// The commonest first.
  std::vector<Loser> list() const;

 private:
  static constexpr size_t kClasses = analytic::kRefusals + 5 + analytic::kTimeParts + analytic::kMemoryParts;
  struct Entry {
    Loser loser;
    int distance = -1;  ///< of the example from the best; -1: no example yet
  };
  /// The entry of a class, its points counted.
  Entry& count(size_t index, Loss loss, int64_t points);
  void nearer_to_best(Entry& entry, const Point& example);
  void nearer_to_first(Loser& loser, const Candidate& candidate);

  Objective objective_;
  std::array<Entry, kClasses> entries_;
  Point best_;
  bool have_best_ = false;
};

}  // namespace shardlab::simulator::search
