// How long whoever waits watches before sleeping, and how.
#pragma once

namespace shardlab::runtime {

/// A wait looks at the clock and at the crew's failure at least this often, whoever forgot to wake it.
inline constexpr double kSlice_s = 0.02;
/// A spin of some 20 us covers the usual distance between ranks that have a core each.
inline constexpr int kSpins = 1000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace shardlab::runtime
