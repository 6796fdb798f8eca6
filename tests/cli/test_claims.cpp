// Verdicts on claims, over hand-made outcomes.
#include "cli/claims.h"

#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

std::vector<CaseOutcome> two_cases() {
  std::vector<CaseOutcome> cases(2);
  for (size_t i = 0; i < 2; ++i) {
    cases[i].config.name = i == 0 ? "small" : "large";
    cases[i].predicted.emplace();
    cases[i].predicted->memory.bytes[static_cast<size_t>(BufferClass::kParameter)] = i == 0 ? 1000 : 4000;
    cases[i].predicted->memory.bytes[static_cast<size_t>(BufferClass::kMoment)] = i == 0 ? 500 : 8000;
  }
  cases[1].reason = "no room";
  return cases;
}

Statement verdict(const std::string& check) {
  const auto all = verdicts({{"a sentence", "a source", check}}, two_cases());
  REQUIRE(all.size() == 1);
  return all[0];
}

}  // namespace

TEST_CASE("a claim that holds says so with its figures") {
  const Statement s = verdict("large.parameter_bytes / small.parameter_bytes == 4 and large.states_bytes == 12000");
  CHECK(s.mood == Statement::Mood::kGood);
  CHECK(
      s.text ==
      "Holds here: \"a sentence\" (a source). Tested: large.parameter_bytes / small.parameter_bytes == 4 and large.states_bytes == "
      "12000, where large.parameter_bytes = 3.906 KiB, small.parameter_bytes = 1000 B, large.states_bytes = 11.72 KiB.");
}

TEST_CASE("a claim that does not hold says so") {
  const Statement s = verdict("small.moment_bytes > large.moment_bytes");
  CHECK(s.mood == Statement::Mood::kBad);
  CHECK(s.text.starts_with("Does not hold here: \"a sentence\""));
}

TEST_CASE("a claim whose figures are not there is undecided, with the reason") {
  CHECK(verdict("other.parameter_bytes > 0").text ==
        "Undecided: \"a sentence\" (a source). Not tested, since there is no case called other.");
  CHECK(verdict("small.speed > 0").text.ends_with("since there is no figure called speed."));
  CHECK(verdict("large.measured_step_s > 0").text.ends_with("since large has no measured_step_s (no room)."));
  CHECK(verdict("small.parameter_bytes").mood == Statement::Mood::kNote);
  CHECK(verdict("small.parameter_bytes / (small.parameter_bytes - 1000) > 1").mood == Statement::Mood::kNote);
}

}  // namespace shardlab::testing
