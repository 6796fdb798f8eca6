#include "tests/wires/sha256.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace shardlab::testing {

namespace {

/// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
std::array<uint32_t, 64> constants() {
  std::array<uint32_t, 64> k{};
  size_t n = 0;
  for (int candidate = 2; n < k.size(); ++candidate) {
    bool prime = true;
    for (int d = 2; d * d <= candidate; ++d) prime = prime && candidate % d != 0;
    if (!prime) continue;
    const long double root = std::cbrt(static_cast<long double>(candidate));
    k[n++] = static_cast<uint32_t>((root - std::floor(root)) * 4294967296.0L);
  }
  return k;
}

}  // namespace

void Sha256::add(const void* bytes, size_t n) {
  const auto* at = static_cast<const uint8_t*>(bytes);
  while (n > 0) {
    const size_t used = length_ % rest_.size(), taken = std::min(n, rest_.size() - used);
    std::memcpy(rest_.data() + used, at, taken);
    length_ += taken, at += taken, n -= taken;
    if (used + taken == rest_.size()) block(rest_.data());
  }
}

void Sha256::block(const uint8_t* at) {
  static const std::array<uint32_t, 64> k = constants();
  std::array<uint32_t, 64> w{};
  for (size_t i = 0; i < 16; ++i)
    w[i] = uint32_t{at[4 * i]} << 24 | uint32_t{at[4 * i + 1]} << 16 | uint32_t{at[4 * i + 2]} << 8 | at[4 * i + 3];
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] + (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t one = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + k[i] + w[i];
    const uint32_t two = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
  }
  const std::array<uint32_t, 8> more{a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state_.size(); ++i) state_[i] += more[i];
}

std::string Sha256::hex() {
  const uint64_t bits = length_ * 8;
  const uint8_t one = 0x80, zero = 0;
  add(&one, 1);
  while (length_ % rest_.size() != 56) add(&zero, 1);
  for (int shift = 56; shift >= 0; shift -= 8) {
    const auto byte = static_cast<uint8_t>(bits >> shift);
    add(&byte, 1);
  }
  std::string text;
  for (const uint32_t word : state_) text += fmt::format("{:08x}", word);
  return text;
}

}  // namespace shardlab::testing
