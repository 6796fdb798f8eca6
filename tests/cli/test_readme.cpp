// What the README prints of the program is what the program prints.
#include <fstream>
#include <sstream>

#include "cli/lists.h"
#include "cli/pairs.h"
#include "tests/test.h"

namespace shardlab {
namespace {

TEST_CASE("the README's table of strategies is generated from the catalogue") {
  std::ifstream file(std::string(SHARDLAB_SOURCE_DIR) + "/README.md");
  std::stringstream text;
  text << file.rdbuf();
  const std::string table = print_table(strategy_table(), TableFormat::kMarkdown);
  INFO("paste the output of `shardlab strategies --format markdown`");
  REQUIRE(text.str().find(table) != std::string::npos);
}

TEST_CASE("the pairs that go together, in docs/compatibility.md, are those that the program lets through") {
  std::ifstream file(std::string(SHARDLAB_SOURCE_DIR) + "/docs/compatibility.md");
  std::stringstream text;
  text << file.rdbuf();
  const std::string tables =
      print_table(pair_matrix(), TableFormat::kMarkdown) + "\n" + print_table(refused_pairs(), TableFormat::kMarkdown);
  INFO("paste the output of `shardlab strategies --pairs --format markdown`");
  REQUIRE(text.str().find(tables) != std::string::npos);
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

}  // namespace
}  // namespace shardlab
