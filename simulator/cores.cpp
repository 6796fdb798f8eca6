#include "simulator/cores.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "plan/base/check.h"

namespace shardlab {

Cores::Cores(int cores, std::vector<bool> first, double turn_s)
    : first_(std::move(first)),
      turn_s_(turn_s),
      holders_(static_cast<size_t>(cores), -1),
      idle_since_(static_cast<size_t>(cores), 0),
      turn_begin_(first_.size(), 0),
      goes_on_(first_.size(), false),
      core_of_(first_.size(), -1),
      last_core_(first_.size(), -1),
      last_holder_(static_cast<size_t>(cores), -1) {
  for (size_t c = holders_.size(); c-- > 0;) idle_.push_back(c);
}

void Cores::grant(int stream, size_t core, double idle_s, double now) {
  grants_.push_back({stream, idle_s, last_holder_[core] == stream || last_holder_[core] < 0});
  core_of_[static_cast<size_t>(stream)] = last_core_[static_cast<size_t>(stream)] = static_cast<int>(core);
  holders_[core] = last_holder_[core] = stream;
  if (!goes_on_[static_cast<size_t>(stream)]) turn_begin_[static_cast<size_t>(stream)] = now;
  goes_on_[static_cast<size_t>(stream)] = false;
  ++busy_;
}

/// The stream that `core` goes to; -1: none waits.
int Cores::next_for(size_t core) {
  std::deque<int>& from = queue_first_.empty() ? queue_ : queue_first_;
  if (from.empty()) return -1;
  auto chosen = from.begin();
  if (queue_first_.empty()) {
    const auto had_it = std::ranges::find(from, static_cast<int>(core), [&](int s) { return last_core_[static_cast<size_t>(s)]; });
    if (had_it != from.end()) chosen = had_it;
  }
  const int stream = *chosen;
  from.erase(chosen);
  return stream;
}

void Cores::want(int stream, double now) {
  SHARDLAB_CHECK(!has(stream), "stream {} has a core", stream);
  if (idle_.empty()) {
    (first_[static_cast<size_t>(stream)] ? queue_first_ : queue_).push_back(stream);
    return;
  }
  auto core = std::ranges::find(idle_, last_core_[static_cast<size_t>(stream)], [](size_t c) { return static_cast<int>(c); });
  if (core == idle_.end()) {
    const auto fresh = std::find_if(idle_.rbegin(), idle_.rend(), [&](size_t c) { return last_holder_[c] < 0; });
    core = fresh == idle_.rend() ? idle_.end() - 1 : std::prev(fresh.base());
  }
  const size_t chosen = *core;
  idle_.erase(core);
  grant(stream, chosen, now - idle_since_[chosen], now);
}

void Cores::give_up(int stream, double now) {
  if (!has(stream)) return;
  const size_t core = static_cast<size_t>(std::exchange(core_of_[static_cast<size_t>(stream)], -1));
  --busy_;
  if (const int next = next_for(core); next >= 0) return grant(next, core, 0, now);
  holders_[core] = -1;
  idle_since_[core] = now;
  idle_.push_back(core);
}

bool Cores::pause(int stream, double now) {
  if (first_[static_cast<size_t>(stream)] || !has(stream)) return false;
  const size_t core = static_cast<size_t>(core_of_[static_cast<size_t>(stream)]);
  const bool ends = !queue_.empty() && now - turn_begin_[static_cast<size_t>(stream)] >= turn_s_;
  if (!ends && queue_first_.empty()) return false;
  core_of_[static_cast<size_t>(stream)] = -1;
  --busy_;
  if (!queue_first_.empty()) {
    goes_on_[static_cast<size_t>(stream)] = !ends;
    if (!ends) queue_.push_front(stream);
    grant(next_for(core), core, 0, now);
  } else {
    const int oldest = queue_.front();
    queue_.pop_front();
    grant(oldest, core, 0, now);
  }
  if (ends) queue_.push_back(stream);
  return true;
}

std::vector<Cores::Grant> Cores::take_grants() { return std::exchange(grants_, {}); }

}  // namespace shardlab
