// Which program a result came from: the key of --resume.
#include <filesystem>
#include <fstream>

#include "cases/environment.h"
#include "cli/shipped.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

TEST_CASE("a program is known by its commit; a changed tree, or none, by the executable as well") {
  std::string pattern = (std::filesystem::temp_directory_path() / "shardlab-build-XXXXXX").string();
  REQUIRE(::mkdtemp(pattern.data()) != nullptr);
  const std::string executable = pattern + "/program";
  const auto name = [&](const std::string& commit) { return program_version("0.1.0", commit, executable); };
  std::ofstream(executable) << "one build";
  const std::string dirty = name("4f21c2a10f38-dirty"), bare = name("");
  CHECK(name("4f21c2a10f38") == "0.1.0+4f21c2a10f38");
  CHECK(dirty.starts_with("0.1.0+4f21c2a10f38-dirty."));
  CHECK(name("4f21c2a10f38-dirty") == dirty);
  std::ofstream(executable) << "another build";
  CHECK(name("4f21c2a10f38") == "0.1.0+4f21c2a10f38");
  CHECK(name("4f21c2a10f38-dirty") != dirty);
  CHECK(name("") != bare);
  std::filesystem::remove_all(pattern);
  CHECK(name("").starts_with("0.1.0+unknown-"));
}

TEST_CASE("the running program has one name, and results carry it") {
  CHECK(program_version() == program_version());
  CHECK(program_version().starts_with("0.1.0+"));
  CHECK(describe_environment("shardlab run x.yaml").program_version == program_version());
}

TEST_CASE("names of shipped files in a message become paths that are there") {
  std::string folder = (std::filesystem::temp_directory_path() / "shardlab-shipped-XXXXXX").string();
  REQUIRE(::mkdtemp(folder.data()) != nullptr);
  std::filesystem::create_directories(folder + "/no-such-docs");
  std::ofstream(folder + "/no-such-docs/limits.md") << "x";
  CHECK(with_shipped_paths("no-such-docs/limits.md lists it, and no-such-docs/other.md.", folder) ==
        folder + "/no-such-docs/limits.md lists it, and no-such-docs/other.md.");
  CHECK(with_shipped_paths("see (no-such-docs/limits.md).", folder) == "see (" + folder + "/no-such-docs/limits.md).");
  CHECK(with_shipped_paths("/no-such-docs/limits.md ./no-such-docs/limits.md limits.md", folder) ==
        "/no-such-docs/limits.md ./no-such-docs/limits.md limits.md");
  CHECK(with_shipped_paths("no-such-docs/limits.md", "") == "no-such-docs/limits.md");
  CHECK(shipped_or_here("no-such-docs/limits.md", folder) == folder + "/no-such-docs/limits.md");
  CHECK(shipped_or_here("no-such-docs/none.md", folder) == "no-such-docs/none.md");
  CHECK(shipped_or_here("no-such-docs/limits.md", "") == "no-such-docs/limits.md");
  CHECK(shipped_folder().empty());  // this program was built and not installed
  std::filesystem::remove_all(folder);
}
