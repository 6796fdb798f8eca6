// `shardlab plan` on the text of a plan: with a head of comments, of every size, and what is no plan.
#include "plan/limits.h"
#include "tests/cli/program.h"

namespace shardlab::testing {

TEST_CASE("plan reads the language exam, whose files begin with comments") {
  const Scratch scratch;
  int files = 0;
  for (const auto& entry : fs::directory_iterator(source_dir() + "/tests/verify/exam")) {
    INFO(entry.path().string());
    const Output output = shardlab_program(scratch, "plan " + entry.path().string());
    CHECK(output.code == 0);
    CHECK(output.out.find(": nothing found\n") != std::string::npos);
    ++files;
  }
  REQUIRE(files == 15);
}

TEST_CASE("plan refuses an endless file, and reads no more of it than a plan may have") {
  const Scratch scratch;
  const std::string text = slurp(source_dir() + "/tests/verify/exam/fsdp.plan");
  const Output padded =
      shardlab_program(scratch, "plan " + scratch.write("padded.plan", text + std::string(kMaxPlanTextBytes, '\n')));
  CHECK(padded.code == 2);
  CHECK(padded.err.find("the text has more than 67108864 bytes") != std::string::npos);
}

TEST_CASE("plan counts the wire of 4,096 ranks at once") {
  const Scratch scratch;
  const Output output = shardlab_program(scratch, "plan " + source_dir() + "/tests/verify/attacks/powersgd-dp4096.plan");
  CHECK(output.code == 0);
  CHECK(output.out.find("  ranks: 4096\n") != std::string::npos);
}

}  // namespace shardlab::testing
