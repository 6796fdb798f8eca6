#include "simulator/estimator/search/front.h"

#include <algorithm>

namespace shardlab::simulator::search {

bool Front::covers(double seconds, int64_t bytes) const {
  const auto later = members_.upper_bound(seconds);
  return later != members_.begin() && std::prev(later)->second.bytes() <= bytes;
}

void Front::add(const Candidate& c) {
  if (covers(c.seconds(), c.bytes())) return;
  auto at = members_.lower_bound(c.seconds());
  while (at != members_.end() && at->second.bytes() >= c.bytes()) at = members_.erase(at);
  members_.emplace(c.seconds(), c);
}

std::vector<Candidate> joined(std::span<const Front> fronts) {
  std::vector<Candidate> all;
  for (const Front& f : fronts)
    for (const auto& [seconds, candidate] : f.members()) all.push_back(candidate);
  const auto beats = [](const Candidate& a, const Candidate& b) {
    const bool no_worse = a.seconds() <= b.seconds() && a.bytes() <= b.bytes() && a.device_seconds() <= b.device_seconds();
    return no_worse && (a.seconds() < b.seconds() || a.bytes() < b.bytes() || a.device_seconds() < b.device_seconds());
  };
  std::vector<Candidate> front;
  for (const Candidate& c : all)
    if (std::none_of(all.begin(), all.end(), [&](const Candidate& o) { return beats(o, c); })) front.push_back(c);
  std::stable_sort(front.begin(), front.end(),
                   [](const Candidate& a, const Candidate& b) { return better(Objective::kTime, a, b); });
  return front;
}

}  // namespace shardlab::simulator::search
