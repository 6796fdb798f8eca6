// `shardlab plan` on the text of a plan: with a head of comments, and for many ranks.
#include "tests/cli/program.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

TEST_CASE("plan reads the language exam, whose files begin with comments") {
  const Scratch scratch;
  int files = 0;
  for (const auto& entry : fs::directory_iterator(source_dir() + "/tests/verify/exam")) {
    INFO(entry.path().string());
    const Output output = shardlab_program(scratch, "plan " + entry.path().string());
    CHECK(output.code == 0);
    CHECK(output.out.find(": verify finds nothing wrong\n") != std::string::npos);
    ++files;
  }
  REQUIRE(files == 17);
}

TEST_CASE("plan counts the wire of 4,096 ranks at once") {
  const Scratch scratch;
  const Output output = shardlab_program(scratch, "plan " + source_dir() + "/tests/verify/attacks/powersgd-dp4096.plan");
  CHECK(output.code == 0);
  CHECK(output.out.find("  ranks: 4096\n") != std::string::npos);
}

}  // namespace shardlab::testing
