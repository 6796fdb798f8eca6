// Counter-based random numbers: the value of an element depends on (seed, step, tensor, logical element) only,
// never on the layout, the thread or the order of calls.
// Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), Philox4x32-10.
#pragma once

#include <array>
#include <cstdint>

namespace shardlab {

/// Four 32-bit words for one 128-bit counter under one 64-bit key.
constexpr std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ k0, static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

/// The purpose of a random number; part of its counter.
enum class RandomUse : uint32_t { kInitialise = 1, kDropout = 2, kShuffle = 3, kRounding = 4 };

/// Names one stream of random elements: dropout site 5 of step 12, say.
struct RandomKey {
  uint64_t seed = 0;
  RandomUse use = RandomUse::kInitialise;
  uint32_t tensor = 0;  ///< logical tensor or site, below 2^24; the same on every layout
  uint32_t step = 0;
};

/// The 32 random bits of logical element `element` (below 2^64; elements share a Philox block by fours).
constexpr uint32_t random_bits(const RandomKey& key, uint64_t element) {
  const uint64_t block = element / 4;
  const auto words = philox({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                             (static_cast<uint32_t>(key.use) << 24) | key.tensor, key.step},
                            key.seed);
  return words[element % 4];
}

}  // namespace shardlab
