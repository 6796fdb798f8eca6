// How much of a large product of cases a test takes. `./dev test` takes a sample that two cores finish in minutes; `./dev thorough`
// takes the whole that a test was written for.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace shardlab::testing {

/// Whether tests take their whole products: SHARDLAB_THOROUGH is set (`./dev thorough`).
inline bool thorough() { return std::getenv("SHARDLAB_THOROUGH") != nullptr; }

/// Of how many parts one is taken: `whole` when thorough, else `sample`. Parts are dealt by a hash or by counting, so that a sample
/// is the same on every machine.
inline uint64_t dealt(uint64_t whole, uint64_t sample) { return thorough() ? whole : sample; }

/// Whether a sanitizer watches. A case then takes 5 to 30 times as long, and what it looks for shows at any size and in any order.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kWatched = true;
#else
constexpr bool kWatched = false;
#endif

}  // namespace shardlab::testing
