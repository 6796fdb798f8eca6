// The layouts that no other beats in both time and memory, for one number of devices.
#pragma once

#include <map>

#include "simulator/estimator/search/search.h"

namespace shardlab::simulator::search {

class Front {
 public:
  /// Whether some member needs no more time and no more bytes. A candidate that is covered can be left out.
  bool covers(double seconds, int64_t bytes) const;
  /// Takes `candidate` in, unless a member covers it, and drops those that it covers.
  void add(const Candidate& candidate);
  const std::map<double, Candidate>& members() const { return members_; }

 private:
  std::map<double, Candidate> members_;  ///< by seconds; bytes fall
};

/// The candidates of all fronts that no other beats in all of time, memory and device seconds; by time.
std::vector<Candidate> joined(std::span<const Front> fronts);

}  // namespace shardlab::simulator::search
