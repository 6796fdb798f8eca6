// What the README prints of the program is what the program prints, and the tests that documents name are there.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "cli/lists.h"
#include "cli/pairs.h"
#include "tests/test.h"

namespace shardlab {
namespace {

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

const std::filesystem::path kRoot = SHARDLAB_SOURCE_DIR;

TEST_CASE("the README's table of strategies is generated from the catalogue") {
  const std::string table = print_table(strategy_table(), TableFormat::kMarkdown);
  INFO("paste the output of `shardlab strategies --format markdown`");
  REQUIRE(text_of(kRoot / "README.md").find(table) != std::string::npos);
}

TEST_CASE("the pairs that go together, in docs/compatibility.md, are those that the program lets through") {
  const std::string tables =
      print_table(pair_matrix(), TableFormat::kMarkdown) + "\n" + print_table(refused_pairs(), TableFormat::kMarkdown);
  INFO("paste the output of `shardlab strategies --pairs --format markdown`");
  REQUIRE(text_of(kRoot / "docs/compatibility.md").find(tables) != std::string::npos);
}

TEST_CASE("every pair is judged once, and every refusal says what to do instead") {
  const Table all = pair_list(), refused = refused_pairs();
  size_t legal = 0;
  for (const auto& row : all.rows) legal += std::get<bool>(row[2]) ? 1 : 0;
  CHECK(all.rows.size() == legal + refused.rows.size());
  CHECK(legal > refused.rows.size());
  for (const auto& row : refused.rows) {
    CAPTURE(std::get<std::string>(row[1]), std::get<std::string>(row[2]));
    CHECK_FALSE(std::get<std::string>(row[3]).empty());
    CHECK_FALSE(std::get<std::string>(row[4]).empty());
  }
}

TEST_CASE("every test that docs/pitfalls.md names is there") {
  std::string sources;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(kRoot / "tests"))
    if (entry.path().extension() == ".cpp") sources += text_of(entry.path());
  const std::string page = text_of(kRoot / "docs/pitfalls.md");
  size_t rows = 0, named = 0;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("| ") || line.starts_with("| fault")) continue;
    ++rows;
    const std::string tests = line.substr(line.rfind(" | ") + 3);  // the last cell
    for (size_t begin = tests.find('`'); begin != std::string::npos; begin = tests.find('`', begin)) {
      const size_t end = tests.find('`', begin + 1);
      REQUIRE(end != std::string::npos);
      const std::string name = tests.substr(begin + 1, end - begin - 1);
      INFO(name);
      CHECK(sources.find("TEST_CASE(\"" + name + "\"") != std::string::npos);
      ++named;
      begin = end + 1;
    }
  }
  CHECK(rows > 30);
  CHECK(named >= rows);  // each row has a test
}

}  // namespace
}  // namespace shardlab
