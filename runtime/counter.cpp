#include "runtime/counter.h"

#include <climits>

#include "plan/base/check.h"
#include "runtime/futex.h"

namespace shardlab::runtime {

void Counter::lower_wake_at(uint64_t target) {
  uint64_t wake_at = wake_at_.load(std::memory_order_seq_cst);
  while (target < wake_at && !wake_at_.compare_exchange_weak(wake_at, target, std::memory_order_seq_cst)) {}
}

void Counter::sleep_until(uint64_t target, double seconds) {
  // The epoch is read first: a wake that clears the target stated below also changes the epoch, and the futex then refuses to
  // sleep.
  const uint32_t epoch = epoch_.load(std::memory_order_seq_cst);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  lower_wake_at(target);
  if (value_.load(std::memory_order_seq_cst) < target) futex_wait(epoch_, epoch, seconds, shared_);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void Counter::wake_all() {
  wake_at_.store(kNobody, std::memory_order_seq_cst);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake(epoch_, INT_MAX, shared_);
  if (CounterListener* const listener = listener_.load(std::memory_order_seq_cst)) listener->reached(*this);
}

bool Counter::tell(uint64_t target, CounterListener& listener) {
  SHARDLAB_CHECK(!shared_, "nobody of another process can be told of a counter");
  listener_.store(&listener, std::memory_order_seq_cst);
  lower_wake_at(target);
  return value_.load(std::memory_order_seq_cst) >= target;
}

}  // namespace shardlab::runtime
