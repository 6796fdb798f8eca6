// The arena and its ledger by themselves.
#include <cstring>

#include "runtime/arena.h"
#include "tests/namespaces.h"
#include "tests/test.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace shardlab::testing {

TEST_CASE("the ledger adds aligned bytes by class and keeps the first moment of the peak", "[memory]") {
  Ledger ledger;
  ledger.allocate(Space::kDevice, BufferClass::kParameter, 1);
  ledger.allocate(Space::kDevice, BufferClass::kActivation, 65);
  ledger.allocate(Space::kHost, BufferClass::kOther, 64);
  REQUIRE(ledger.peak(Space::kDevice) == 64 + 128);
  ledger.free(Space::kDevice, BufferClass::kActivation, 65);
  ledger.allocate(Space::kDevice, BufferClass::kTemporary, 128);  // as high as before: the first moment stands
  REQUIRE(ledger.live(Space::kDevice) == 192);
  REQUIRE(ledger.peak(Space::kDevice) == 192);
  REQUIRE(ledger.at_peak(Space::kDevice).bytes[static_cast<size_t>(BufferClass::kActivation)] == 128);
  REQUIRE(ledger.at_peak(Space::kDevice).bytes[static_cast<size_t>(BufferClass::kTemporary)] == 0);
  REQUIRE(ledger.peak(Space::kHost) == 64);
  REQUIRE(ledger.peak(Space::kNvme) == 0);
}

TEST_CASE("an arena without reserve has no addresses", "[memory]") {
  Arena arena({{int64_t{1} << 50, 0, 0}}, {.reserve = false});
  REQUIRE(arena.at(Space::kDevice, 64) == nullptr);
  arena.allocate(Space::kDevice, 64, 64);
  arena.free(Space::kDevice, 64, 64);
  REQUIRE(arena.bytes(Space::kDevice) == int64_t{1} << 50);
}

TEST_CASE("poison fills what is fresh and what is freed", "[memory]") {
  Arena arena({{256, 128, 0}}, {.poison = true});
  arena.touch();
  arena.allocate(Space::kHost, 64, 64);
  uint32_t word = 0;
  std::memcpy(&word, arena.at(Space::kHost, 64), 4);
  REQUIRE(word == kPoison);
  REQUIRE(reinterpret_cast<uintptr_t>(arena.at(Space::kDevice, 64)) % kAlignment == 0);
}

#if defined(__SANITIZE_ADDRESS__)
TEST_CASE("dead storage is out of bounds to the address sanitizer", "[memory]") {
  Arena arena({{256, 0, 0}}, {});
  arena.touch();
  std::byte* p = arena.at(Space::kDevice, 64);
  REQUIRE(__asan_address_is_poisoned(p));
  arena.allocate(Space::kDevice, 64, 40);
  REQUIRE_FALSE(__asan_address_is_poisoned(p));
  REQUIRE_FALSE(__asan_address_is_poisoned(p + 39));
  REQUIRE(__asan_address_is_poisoned(p + 40));  // the padding too
  arena.free(Space::kDevice, 64, 40);
  REQUIRE(__asan_address_is_poisoned(p));
}
#endif

}  // namespace shardlab::testing
