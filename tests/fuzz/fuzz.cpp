// The fuzzer's entry points. SHARDLAB_FUZZ names the reader: libFuzzer gives its own processes the same environment, and no
// arguments of ours.
#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>

#include "tests/fuzz/readers.h"

namespace {
void (*read_bytes)(std::string_view) = nullptr;
}

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* wanted = std::getenv("SHARDLAB_FUZZ");
  for (const shardlab::testing::fuzz::Reader& reader : shardlab::testing::fuzz::readers())
    if (wanted != nullptr && reader.name == wanted) read_bytes = reader.read;
  if (read_bytes != nullptr) return 0;
  fmt::print(stderr, "SHARDLAB_FUZZ is `{}`; one of:", wanted == nullptr ? "" : wanted);
  for (const shardlab::testing::fuzz::Reader& reader : shardlab::testing::fuzz::readers()) fmt::print(stderr, " {}", reader.name);
  fmt::print(stderr, "\n");
  std::exit(2);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  read_bytes({reinterpret_cast<const char*>(data), size});
  return 0;
}
