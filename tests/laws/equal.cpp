#include "tests/laws/equal.h"

#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

Plan plan_of(const Case& c, bool verified) {
  INFO(c.name);
  auto plan = lower(c, {.after = {}, .verify = verified});
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  return std::move(plan).value();
}

void require_equal(const Case& c, bool verified) {
  INFO(c.name);
  REQUIRE(check(c).ok());
  REQUIRE(difference_from_replay(plan_of(c, verified)) == "");
}

}  // namespace shardlab::testing
