// Sleeping on a word until another thread changes it, as Linux has it (futex(2)).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <ctime>

namespace shardlab::runtime {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is the atomic's own word");

/// Sleeps while `word` is `expected`, at most about `seconds`. May return early. `shared`: other processes use the word too.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, double seconds, bool shared = false) {
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
  syscall(SYS_futex, &word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, expected, &limit, nullptr, 0);
}

/// Wakes at most `sleepers` of those who sleep on `word`.
inline void futex_wake(std::atomic<uint32_t>& word, int sleepers, bool shared = false) {
  syscall(SYS_futex, &word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, sleepers, nullptr, nullptr, 0);
}

}  // namespace shardlab::runtime
