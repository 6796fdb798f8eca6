// Keeps account of the points that are not among the best: how many of each class, and the nearest of them.
#pragma once

#include <vector>

#include "simulator/search/search.h"

namespace shardlab::simulator::search {

/// Axes in which two points differ.
int distance(const Point& a, const Point& b);

class Losers {
 public:
  explicit Losers(Objective objective) : objective_(objective) {}

  void illegal(analytic::Refusal refusal, int64_t points, const Point& example);
  void undivided(const Point& example);
  /// `bytes` of a point, or which all of `points` need at least.
  void too_large(int64_t points, const Point& example, int64_t bytes);
  void bounded(int64_t points, const Point& example, double least_s);
  /// A layout that fits, when `best` is the best known.
  void beaten(const Candidate& candidate, const Candidate& best);
  /// Examples of what is illegal are from now on those nearest to `best`.
  void new_best(const Point& best);

  /// The commonest first.
  std::vector<Loser> list() const;

 private:
  static constexpr size_t kClasses = analytic::kRefusals + 3 + analytic::kTimeParts + analytic::kMemoryParts;
  struct Entry {
    Loser loser;
    int distance = -1;  ///< of the example from the best; -1: no example yet
  };
  /// The entry of a class, its points counted.
  Entry& count(size_t index, Loss loss, int64_t points);
  void nearer_to_best(Entry& entry, const Point& example);

  Objective objective_;
  std::array<Entry, kClasses> entries_;
  Point best_;
  bool have_best_ = false;
};

}  // namespace shardlab::simulator::search
