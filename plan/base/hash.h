// Stable 64-bit hashing for keys that are stored (case ids, resume keys): the same on every machine.
#pragma once

#include <cstdint>
#include <string_view>

namespace shardlab {

inline constexpr uint64_t kHashPrime = 0x100000001b3ull;  ///< of FNV-1a with 64 bits

/// FNV-1a of `text`, continued from `seed`.
constexpr uint64_t hash_text(std::string_view text, uint64_t seed = 0xcbf29ce484222325ull) {
  for (const char c : text) seed = (seed ^ static_cast<unsigned char>(c)) * kHashPrime;
  return seed;
}

/// A well-mixed value for one integer (splitmix64).
constexpr uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace shardlab
