// A count that only grows, on which threads sleep until it reaches what they wait for.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

namespace shardlab::runtime {

class Counter;

/// Is told in place of threads asleep.
class CounterListener {
 public:
  virtual ~CounterListener() = default;
  /// A target that was given to `counter.tell` may be reached. On the thread that advanced it.
  virtual void reached(Counter& counter) = 0;
};

/// The one primitive of waiting: streams count completed instructions, channels count messages posted and taken.
///
/// `advance` costs one atomic addition and one load while nobody sleeps. A sleeper states the value it needs, so that a
/// stream which waits for instruction 500 is not woken 499 times.
class alignas(64) Counter {
 public:
  /// `shared`: it lies in memory that processes share. Then nobody may be told of it, as a listener is of one process.
  explicit Counter(bool shared = false) : shared_(shared) {}
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

  /// Has `listener` told once the value is `target` or more. True: it is already, and nobody may be told. A counter has one
  /// listener; of several targets the listener is told of the smallest and gives the others again.
  bool tell(uint64_t target, CounterListener& listener);
  void tell_nobody() { listener_.store(nullptr, std::memory_order_seq_cst); }

 private:
  void lower_wake_at(uint64_t target);

  static constexpr uint64_t kNobody = std::numeric_limits<uint64_t>::max();
  std::atomic<uint64_t> value_{0};
  std::atomic<uint64_t> wake_at_{kNobody};  ///< the smallest target of any sleeper or listener
  std::atomic<uint32_t> epoch_{0};          ///< the futex: changes at each wake
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<CounterListener*> listener_{nullptr};
  const bool shared_;
};

}  // namespace shardlab::runtime
