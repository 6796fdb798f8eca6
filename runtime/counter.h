// A count that only grows, on which threads sleep until it reaches what they wait for.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

namespace shardlab {

/// The one primitive of waiting: streams count completed instructions, channels count messages posted and taken.
///
/// `advance` costs one atomic addition and one load while nobody sleeps. A sleeper states the value it needs, so that a
/// stream which waits for instruction 500 is not woken 499 times.
class alignas(64) Counter {
 public:
  Counter() = default;
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;

  /// What happened before the count reached this value is visible to the caller.
  uint64_t value() const { return value_.load(std::memory_order_acquire); }

  /// Adds `by` and wakes those whose target is reached.
  void advance(uint64_t by = 1) {
    // Sequentially consistent on both sides: either this thread sees the sleeper's target, or the sleeper sees the new value.
    const uint64_t now = value_.fetch_add(by, std::memory_order_seq_cst) + by;
    if (now >= wake_at_.load(std::memory_order_seq_cst)) [[unlikely]]
      wake_all();
  }

  /// Back to 0. Only while no thread uses the counter.
  void reset() { value_.store(0, std::memory_order_relaxed); }

  /// Sleeps until the value may have reached `target`, somebody called `wake_all`, or about `seconds` have passed. The caller
  /// looks again: this may return early.
  void sleep_until(uint64_t target, double seconds);

  /// Wakes every sleeper, whatever it waits for.
  void wake_all();

 private:
  static constexpr uint64_t kNobody = std::numeric_limits<uint64_t>::max();
  std::atomic<uint64_t> value_{0};
  std::atomic<uint64_t> wake_at_{kNobody};  ///< the smallest target of any sleeper
  std::atomic<uint32_t> epoch_{0};          ///< the futex: changes at each wake
};

}  // namespace shardlab
