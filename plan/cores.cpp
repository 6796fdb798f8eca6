#include "plan/cores.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "plan/base/check.h"

namespace shardlab {

Cores::Cores(int cores, double turn_s) : turn_s_(turn_s), cores_(static_cast<size_t>(cores)) {
  SHARDLAB_CHECK(cores > 0, "streams without a core");
  for (int c = cores; c-- > 0;) idle_.push_back(c);
}

void Cores::add(bool first) {
  streams_.emplace_back();
  streams_.back().first = first;
}

void Cores::grant(int stream, int core, double idle_s, double now) {
  Stream& s = at(stream);
  Core& c = cores_[static_cast<size_t>(core)];
  if (!std::exchange(s.goes_on, false)) s.turn_begin = now;
  const bool moved = s.last_core != core, watched = c.last_holder == stream || c.last_holder < 0;
  s.core = s.last_core = core;
  c.holder = c.last_holder = stream;
  grants_.push_back({stream, core, moved, watched, idle_s, s.turn_begin});
}

/// The stream that `core` goes to; -1: none waits.
int Cores::next_for(int core) {
  std::deque<int>& from = first_.empty() ? control_ : first_;
  if (from.empty()) return -1;
  auto chosen = from.begin();
  if (first_.empty()) {
    const auto had_it = std::ranges::find_if(from, [&](int s) { return at(s).last_core == core; });
    if (had_it != from.end()) chosen = had_it;
  }
  const int stream = *chosen;
  from.erase(chosen);
  return stream;
}

void Cores::want(int stream, double now) {
  SHARDLAB_CHECK(!has(stream), "stream {} has a core", stream);
  if (idle_.empty()) return queue_of(stream).push_back(stream);
  auto found = std::ranges::find(idle_, at(stream).last_core);
  if (found == idle_.end()) {
    const auto is_new = [&](int c) { return cores_[static_cast<size_t>(c)].last_holder < 0; };
    const auto fresh = std::find_if(idle_.rbegin(), idle_.rend(), is_new);
    found = fresh == idle_.rend() ? idle_.end() - 1 : std::prev(fresh.base());
  }
  const int core = *found;
  idle_.erase(found);
  grant(stream, core, now - cores_[static_cast<size_t>(core)].idle_since, now);
}

void Cores::give_up(int stream, double now) {
  const int core = std::exchange(at(stream).core, -1);
  if (core < 0) return;
  if (const int next = next_for(core); next >= 0) return grant(next, core, 0, now);
  cores_[static_cast<size_t>(core)].holder = -1;
  cores_[static_cast<size_t>(core)].idle_since = now;
  idle_.push_back(core);
}

bool Cores::pause(int stream, double now) {
  Stream& s = at(stream);
  if (s.first || s.core < 0) return false;
  const bool ends = !control_.empty() && now - s.turn_begin >= turn_s_;
  if (!ends && first_.empty()) return false;
  const int core = std::exchange(s.core, -1);
  if (!first_.empty()) {
    s.goes_on = !ends;
    if (!ends) control_.push_front(stream);
    grant(next_for(core), core, 0, now);
  } else {
    const int oldest = control_.front();
    control_.pop_front();
    grant(oldest, core, 0, now);
  }
  if (ends) control_.push_back(stream);
  return true;
}

void Cores::forget(int stream) { std::erase(queue_of(stream), stream); }

std::vector<Cores::Grant> Cores::take_grants() { return std::exchange(grants_, {}); }

}  // namespace shardlab
