#include "plan/trace_steps.h"

#include <algorithm>

namespace shardlab {

int median_step(const Trace& trace) {
  const size_t ranks = static_cast<size_t>(trace.world_size);
  std::vector<std::pair<double, int>> lengths;
  for (int step = 0; step < trace.steps; ++step) {
    double longest = 0;
    for (size_t rank = 0; rank < ranks; ++rank) {
      const size_t at = static_cast<size_t>(step) * ranks + rank;
      if (at >= trace.step_interval.size()) break;
      longest = std::max(longest, trace.step_interval[at][1] - trace.step_interval[at][0]);
    }
    lengths.emplace_back(longest, step);
  }
  if (lengths.empty()) return 0;
  std::ranges::sort(lengths);
  return lengths[lengths.size() / 2].second;
}

Trace only_step(const Trace& trace, int step) {
  const size_t ranks = static_cast<size_t>(trace.world_size), first = static_cast<size_t>(step) * ranks;
  Trace one = trace;
  one.steps = 1;
  one.step_interval.clear();
  for (size_t at = first; at < std::min(first + ranks, trace.step_interval.size()); ++at)
    one.step_interval.push_back(trace.step_interval[at]);
  std::erase_if(one.events, [&](const TraceEvent& e) { return e.step != step; });
  for (TraceEvent& e : one.events) e.step = 0;
  std::erase_if(one.details, [&](const TraceDetail& d) { return d.step != step; });
  for (TraceDetail& d : one.details) d.step = 0;
  return one;
}

}  // namespace shardlab
