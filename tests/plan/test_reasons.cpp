// Reasons that differ in their values are one row.
#include "plan/reasons.h"

#include "tests/test.h"

namespace shardlab {
namespace {

TEST_CASE("reasons that differ in their values alone are one, with the values") {
  Reasons reasons;
  reasons.add("tp does not divide", "z");
  for (const int zero : {1, 2, 3, 2})
    reasons.add("zero=" + std::to_string(zero) + " with dp=1: nothing to shard over", "z" + std::to_string(zero));
  const auto list = reasons.list();
  REQUIRE(list.size() == 2);
  CHECK(list[0].text == "zero=1, 2 or 3 with dp=1: nothing to shard over");
  CHECK(list[0].cases == 4);
  CHECK(list[0].example == "z1");
  CHECK(list[1].text == "tp does not divide");
  CHECK(list[1].cases == 1);
}

TEST_CASE("of many values some are shown, words after = are values, words elsewhere are not") {
  Reasons reasons;
  for (int tp = 1; tp <= 64; tp *= 2) reasons.add("heads=12 with tp=" + std::to_string(tp), "a");
  reasons.add("schedule=1f1b with pp=1.", "b");
  reasons.add("schedule=zb-v with pp=1.", "c");
  reasons.add("megatron has no afab", "d");
  reasons.add("megatron has no none", "e");
  const auto list = reasons.list();
  REQUIRE(list.size() == 4);
  CHECK(list[0].text == "heads=12 with tp=1, 2, ..., 64");
  CHECK(list[1].text == "schedule=1f1b or zb-v with pp=1.");
  CHECK(list[1].cases == 2);
  CHECK(list[2].text == "megatron has no afab");
}

TEST_CASE("where many values of several places vary, the first case's stand for all") {
  Reasons reasons;
  for (int tp = 1; tp <= 64; tp *= 2)
    reasons.add("tp " + std::to_string(tp) + " * 2 = " + std::to_string(2 * tp) + " ranks; lower tp", "a");
  CHECK(reasons.list()[0].text == "tp 1 * 2 = 2 ranks (the first case; the others have other values); lower tp");
}

TEST_CASE("a last value that is shown already is not shown again") {
  Reasons reasons;
  for (const int tp : {1, 2, 4, 8, 16, 2}) reasons.add("heads=12 with tp=" + std::to_string(tp), "a");
  CHECK(reasons.list()[0].text == "heads=12 with tp=1, 2, ...");
}

TEST_CASE("advice tells no reasons apart, and stands where it is one") {
  Reasons reasons;
  reasons.add("llm.c has no tp; use megatron, torchtitan", "a");
  reasons.add("llm.c has no tp; use megatron", "b");
  reasons.add("pp=2 on 1 layer; lower pp", "c");
  const auto list = reasons.list();
  REQUIRE(list.size() == 2);
  CHECK(list[0].text == "llm.c has no tp");
  CHECK(list[0].cases == 2);
  CHECK(list[1].text == "pp=2 on 1 layer; lower pp");
}

TEST_CASE("no reason, no row; an empty one is one") {
  Reasons reasons;
  CHECK(reasons.empty());
  CHECK(reasons.list().empty());
  reasons.add("", "a");
  CHECK(reasons.list().size() == 1);
}

}  // namespace
}  // namespace shardlab
