// SHA-256 (FIPS 180-4), for figures that others can compare.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace shardlab::testing {

class Sha256 {
 public:
  void add(const void* bytes, size_t n);
  /// 64 digits. Nothing is added afterwards.
  std::string hex();

 private:
  void block(const uint8_t* at);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> rest_{};
  uint64_t length_ = 0;
};

}  // namespace shardlab::testing
