#include "simulator/estimator/validate/ratchet.h"
#include "tests/test.h"

namespace shardlab::simulator::validation {
namespace {

const Recorded kEntry{{"set", "step_error_pct", 5.0}, 5.0, 0.5, ""};

TEST_CASE("a figure may worsen within its tolerance and no further") {
  const std::vector<Recorded> recorded{kEntry};
  CHECK(compare_scores(recorded, std::vector<Figure>{{"set", "step_error_pct", 4.0}}).empty());
  CHECK(compare_scores(recorded, std::vector<Figure>{{"set", "step_error_pct", 5.5}}).empty());
  CHECK(compare_scores(recorded, std::vector<Figure>{{"set", "step_error_pct", 5.51}}) ==
        std::vector<std::string>{"set step_error_pct worsened from 5.000 to 5.510, more than the tolerance 0.500"});
}

TEST_CASE("the ratchet covers exactly the figures that there are") {
  const std::vector<Recorded> recorded{kEntry};
  CHECK(compare_scores(recorded, {}) == std::vector<std::string>{"set step_error_pct is recorded and no longer measured"});
  CHECK(compare_scores({}, std::vector<Figure>{{"set", "rank_missing", 0.1}}) ==
        std::vector<std::string>{"set rank_missing = 0.100 is not recorded"});
}

TEST_CASE("a recorded worsening needs its reason") {
  const std::vector<Figure> now{{"set", "step_error_pct", 7.0}};
  std::vector<Recorded> updated = update_scores(std::vector<Recorded>{kEntry}, now);
  REQUIRE(updated.size() == 1);
  CHECK(updated[0].figure.value == 7.0);
  CHECK(updated[0].best == 5.0);
  CHECK(compare_scores(updated, now) ==
        std::vector<std::string>{"set step_error_pct was 5.000 and is recorded as 7.000 without a reason"});
  updated[0].reason = "the rows of 2023 are scored too";
  CHECK(compare_scores(updated, now).empty());
  const auto better = update_scores(updated, std::vector<Figure>{{"set", "step_error_pct", 4.0}});
  CHECK(better[0].best == 4.0);
}

TEST_CASE("the file of scores reads back as written") {
  std::vector<Recorded> scores{kEntry, {{"a, b", "rank_missing", 0.25}, 0.125, 0.1, "why, \"so\""}};
  const std::string text = write_scores(scores);
  const auto read = read_scores(text, "scores.csv");
  REQUIRE(read.ok());
  CHECK(write_scores(*read) == text);
  CHECK((*read)[1].reason == "why, \"so\"");
  CHECK(read_scores("group,figure,value\na,b,1\n", "s").error().message == "the columns are group,figure,value\n");
  CHECK(read_scores("group,figure,value,best,tolerance,reason\na,b,1,x,0,\n", "s").error().where == "s:2:7");
}

TEST_CASE("every figure of a score is less when it is better") {
  Score s;
  s.group = "g";
  s.refused = 2;
  s.step = {3, -0.02, 0.05, 0.04, -0.2, "g:1"};
  s.rank = 0.9;
  s.layout_loss = 0.03;
  s.memory[1] = {1, 0.1, 0.1, 0.1, 0.1, "g:2"};
  s.fit = {9, 0, 0, 1};
  s.step_interval = {50, 46, 0.2};
  s.memory_interval = {10, 8, 0.1};
  std::string text;
  for (const Figure& f : figures_of(s)) text += f.name + "=" + std::to_string(f.value) + " ";
  CHECK(text ==
        "refused_rows=2.000000 step_error_pct=5.000000 step_bias_pct=2.000000 step_worst_pct=20.000000 rank_missing=0.100000 "
        "layout_loss_pct=3.000000 reserved_error_pct=10.000000 fit_wrong_pct=10.000000 step_uncovered_pct=8.000000 "
        "step_interval_pct=20.000000 memory_uncovered_pct=20.000000 memory_interval_pct=10.000000 ");
}

}  // namespace
}  // namespace shardlab::simulator::validation
