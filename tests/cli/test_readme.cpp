// What the README prints of the program is what the program prints.
#include <fstream>
#include <sstream>

#include "cli/lists.h"
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

}  // namespace
}  // namespace shardlab
