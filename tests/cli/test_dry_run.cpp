// A dry run of many points: they are counted, not kept.
#include <sys/wait.h>

#include <cstdlib>

#include "tests/cli/program.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

TEST_CASE("fifty thousand points are counted within 640 MiB") {
  const Scratch scratch;
  const std::string sweep =
      scratch.write("grid.yaml",
                    "model: tiny-gpt\nmachine: h100-sxm5-80gb\ntrain: {seq_len: 64, global_batch_tokens: 512}\n"
                    "axes: {seed: {range: [1, 50000]}}\n");
  const std::string out = scratch / "out.txt";
  const int status = std::system(fmt::format("ulimit -v 655360; {} run {} --dry-run >{} 2>&1", program_path(), sweep, out).c_str());
  INFO(slurp(out));
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(slurp(out).find("50000 points: 50000 to run, 0 refused") != std::string::npos);
}

}  // namespace
}  // namespace shardlab::testing
