// The current activity of a process that trains, for a watcher that asks when it takes too long.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace shardlab::runtime {

class Crew;

/// Told by a training process where it is; asked from a thread that does not train. All calls are safe from any thread, and none
/// waits for a rank: a rank may stand still for good.
class Watch {
 public:
  /// The process begins a phase: "lowers the plan". The text must live as long as the watch.
  void begin(const char* phase) { phase_.store(phase, std::memory_order_relaxed); }
  /// A step begins, of `steps` steps.
  void begin_step(int64_t step, int64_t steps) {
    step_.store(step, std::memory_order_relaxed);
    steps_.store(steps, std::memory_order_relaxed);
  }
  /// A session's tasks, from before their first step until after they have ended.
  void enter(const Crew& crew);
  void leave(const Crew& crew);

  /// The state of all ranks in one line: the rank that stands still, its op and why; then the op that each other rank waits in, and
  /// what it waits for. Or that no rank stands still. Looks twice, `seconds` apart.
  std::string picture(double seconds) const;

 private:
  std::atomic<const char*> phase_{"begins"};
  std::atomic<int64_t> step_{0}, steps_{0};
  mutable std::mutex mutex_;
  std::vector<const Crew*> crews_;
};

}  // namespace shardlab::runtime
