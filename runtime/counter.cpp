#include "runtime/counter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cmath>
#include <ctime>

namespace shardlab {

namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is the atomic's own word");

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, double seconds) {
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, &limit, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace

void Counter::sleep_until(uint64_t target, double seconds) {
  // The epoch is read first: a wake that clears the target stated below also changes the epoch, and the futex then refuses to
  // sleep.
  const uint32_t epoch = epoch_.load(std::memory_order_seq_cst);
  uint64_t wake_at = wake_at_.load(std::memory_order_seq_cst);
  while (target < wake_at && !wake_at_.compare_exchange_weak(wake_at, target, std::memory_order_seq_cst)) {}
  if (value_.load(std::memory_order_seq_cst) >= target) return;
  futex_wait(epoch_, epoch, seconds);
}

void Counter::wake_all() {
  wake_at_.store(kNobody, std::memory_order_seq_cst);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(epoch_);
}

}  // namespace shardlab
