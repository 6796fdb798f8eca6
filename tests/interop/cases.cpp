#include "tests/interop/cases.h"

#include <fmt/format.h>

#include "sweeps/resolution.h"
#include "sweeps/sweep.h"
#include "tests/test.h"

namespace shardlab::testing {

Case point_of(const std::string& yaml) {
  const auto sweep = sweeps::load_sweep_text(yaml, "test.yaml");
  INFO(yaml);
  INFO((sweep.ok() ? std::string() : to_string(sweep.error())));
  REQUIRE(sweep.ok());
  const auto expansion = sweeps::expand(*sweep, sweeps::Resolution::kAnalytic);
  INFO((expansion.ok() ? std::string() : to_string(expansion.error())));
  REQUIRE(expansion.ok());
  REQUIRE(expansion->points.size() == 1);
  INFO((expansion->points[0].refusal ? to_string(*expansion->points[0].refusal) : std::string()));
  REQUIRE_FALSE(expansion->points[0].refusal);
  return expansion->points[0].config;
}

Case llama(const std::string& profile, const std::string& more) {
  return point_of(
      fmt::format("profile: {}\nname: test\nmodel: llama-3.1-8b\nmachine: {{preset: hgx-h100-ndr, nodes: 2}}\nseq_len: 8192\n"
                  "global_batch_tokens: 1Mi\nprecision: bf16\n{}",
                  profile, more));
}

}  // namespace shardlab::testing
