// What the fuzzer kept, read again by the same entry points: seeds, inputs that reach further than others, and those that once
// crashed.
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "tests/fuzz/readers.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;
namespace fs = std::filesystem;

namespace {

constexpr rlim_t kMemory = rlim_t{4} << 30;  ///< bytes of address space in which every input is read or refused
constexpr unsigned kSeconds = 60;            ///< for one input, on the slowest machine

std::string corpus() { return testing::source_dir() + "/tests/fuzz/corpus"; }

}  // namespace

TEST_CASE("every input of the corpus is read or refused, in bounded time and memory") {
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
  const rlimit bounded{std::min(kMemory, before.rlim_max), before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_AS, &bounded) == 0);
  int64_t bytes = 0;
  for (const fuzz::Reader& reader : fuzz::readers()) {
    INFO(reader.name);
    int inputs = 0;
    for (const auto& entry : fs::directory_iterator(corpus() + "/" + std::string(reader.name))) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::string text{std::istreambuf_iterator<char>(file), {}};
      UNSCOPED_INFO(entry.path().string());
      alarm(kSeconds);  // the signal ends the test, which names the input
      reader.read(text);
      alarm(0);
      bytes += static_cast<int64_t>(text.size());
      ++inputs;
    }
    CHECK(inputs > 0);
  }
  setrlimit(RLIMIT_AS, &before);
  CHECK(bytes < 2'000'000);
}

TEST_CASE("every folder of the corpus has its reader") {
  std::set<std::string> names, folders;
  for (const fuzz::Reader& reader : fuzz::readers()) names.emplace(reader.name);
  for (const auto& entry : fs::directory_iterator(corpus())) folders.insert(entry.path().filename().string());
  CHECK(folders == names);
}
