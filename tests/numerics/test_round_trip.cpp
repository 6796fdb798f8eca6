// What the matrix lowers is read back as it was printed and verifies again: the plan's text is its language, and a plan that says
// other than its text, or what the text cannot say, shows here.
#include "plan/text.h"
#include "plan/verify.h"
#include "strategies/lower.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/test.h"

namespace shardlab::testing::of_round_trip {
namespace {

/// Of the product every so many rows: a prime, so that no key's values are stepped over alike.
size_t stride() { return dealt(23, 67); }

void require_round_trip(const Case& config) {
  INFO(config.name);
  const auto plan = lower(config);
  REQUIRE((plan.ok() ? "" : to_string(plan.error())) == "");
  const std::string text = print(*plan);
  const auto again = parse_plan(text);
  REQUIRE((again.ok() ? "" : to_string(again.error())) == "");
  REQUIRE(print(*again) == text);
  const auto proved = verify(*again);
  REQUIRE((proved.ok() ? "" : to_string(proved.error())) == "");
}

}  // namespace

TEST_CASE("the matrix's plans are read back as they were printed, and verify again") {
  size_t rows = 0, next = 0;
  for (const auto& layouts : {layouts(), deep_layouts(), selective_layouts(), offload_layouts()})
    for (const Subject& subject : subjects())
      for (const Case& row : rows_of(subject, layouts))
        if (rows++ == next) {
          next += stride();
          require_round_trip(row);
        }
  for (const Subject& subject : uneven_subjects())
    for (const Case& row : rows_of(subject, uneven_layouts()))
      if (rows++ % dealt(1, 3) == 0) require_round_trip(row);
  REQUIRE(rows > 1000);
}

}  // namespace shardlab::testing::of_round_trip
