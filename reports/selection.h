// The cases of a large directory that a person looks at, chosen as all of them go by.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "plan/outcome.h"

namespace shardlab::reports {

/// The cases that represent many cases.
struct Selection {
  std::vector<CaseOutcome> cases;     ///< in the order of the directory
  std::array<int64_t, 5> left_out{};  ///< cases that are not among them, by Status
  int64_t total = 0;                  ///< all cases
  bool complete() const { return static_cast<int64_t>(cases.size()) == total; }
};

/// Keeps all cases up to `most`. Of more cases it keeps the fastest, of each model the fastest and the one with the smallest peak, and the
/// cases with the given names. It holds at most twice as many in memory.
class Selector {
 public:
  explicit Selector(size_t most, std::set<std::string> names = {}) : most_(most), names_(std::move(names)) {}
  void add(const CaseOutcome& outcome);
  /// To be called once, last.
  Selection take();

 private:
  struct Kept {
    CaseOutcome outcome;
    int64_t position = 0;
    double rate = 0;     ///< tokens a second, 0 where it is not known
    bool named = false;  ///< stays, whatever its rate
  };
  void shrink();

  size_t most_;
  std::set<std::string> names_;
  std::vector<Kept> kept_;
  std::array<int64_t, 5> seen_{};
  int64_t total_ = 0;
  /// Of the cases of a model.
  struct Best {
    double rate = 0;
    int64_t peak = INT64_MAX;
    friend bool operator==(const Best&, const Best&) = default;
  };
  std::map<std::string, Best, std::less<>> best_;
  double least_rate_ = -1;  ///< that a further case must beat, or be its model's best, once some were given up
};

}  // namespace shardlab::reports
