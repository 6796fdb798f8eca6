#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_MAIN
#endif
#include "tests/namespaces.h"
#include "tests/test.h"

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace shardlab::testing {

std::string golden_difference(const std::string& name, const std::string& text) {
  const std::filesystem::path path = std::filesystem::path(source_dir()) / "tests/golden" / name;
  if (const char* update = std::getenv("SHARDLAB_UPDATE_GOLDEN"); update != nullptr && std::string(update) == "1") {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
    return "";
  }
  std::ifstream file(path);
  if (!file) return fmt::format("{} is missing; run again with SHARDLAB_UPDATE_GOLDEN=1 and review it", path.string());
  std::stringstream stored;
  stored << file.rdbuf();
  if (stored.str() == text) return "";
  std::istringstream want(stored.str()), have(text);
  std::string a, b;
  for (int line = 1;; ++line) {
    const bool more_a = static_cast<bool>(std::getline(want, a)), more_b = static_cast<bool>(std::getline(have, b));
    if (!more_a) a = "<end>";
    if (!more_b) b = "<end>";
    if (a != b || (!more_a && !more_b))
      return fmt::format(
          "{} line {}:\n  golden: {}\n  now:    {}\nIf the change is meant, run again with SHARDLAB_UPDATE_GOLDEN=1 and review it.",
          path.string(), line, a, b);
  }
}

}  // namespace shardlab::testing
