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
    cases[i].predicted->step_s = i == 0 ? 0.3469 : 0.3470;
    cases[i].predicted->peak_bytes = i == 0 ? 1'000'000 : 1'000'001;
  }
  cases[1].reason = "no room";
  return cases;
}

Statement verdict(const std::string& check) {
  const auto all = verdicts({{"a sentence", "a source", check, ""}}, two_cases());
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

TEST_CASE("a claim that does not hold gives its reason") {
  const auto all = verdicts({{"a sentence", "a source", "small.moment_bytes > large.moment_bytes", "large is large"}}, two_cases());
  CHECK(
      all.at(0).text ==
      "Does not hold here: \"a sentence\" (a source). Why: large is large. Tested: small.moment_bytes > large.moment_bytes, where "
      "small.moment_bytes = 500 B, large.moment_bytes = 7.812 KiB.");
  const auto holds =
      verdicts({{"a sentence", "a source", "small.moment_bytes < large.moment_bytes", "large is large"}}, two_cases());
  CHECK(holds.at(0).text.find("large is large") == std::string::npos);
}

TEST_CASE("a verdict that hangs on times which are not told apart says that it has no margin") {
  const Statement s = verdict("small.predicted_step_s < large.predicted_step_s");
  CHECK(s.mood == Statement::Mood::kNote);
  CHECK(
      s.text ==
      "Holds here, without margin: \"a sentence\" (a source). Tested: small.predicted_step_s < large.predicted_step_s, where "
      "small.predicted_step_s = 346.9 ms, large.predicted_step_s = 347.0 ms. No margin: 0.3469 against 0.347, 0.029 % apart; times "
      "and losses are not told apart below 0.5 %.");
  CHECK(verdict("small.predicted_step_s > large.predicted_step_s").text.starts_with("Does not hold here, without margin: "));
  CHECK(verdict("not (small.predicted_step_s > large.predicted_step_s)").mood == Statement::Mood::kNote);
  CHECK(verdict("small.predicted_step_s < 1.004 * large.predicted_step_s").mood == Statement::Mood::kNote);
}

TEST_CASE("a verdict has a margin where bytes are compared, sides lie apart, or another part decides it") {
  CHECK(verdict("small.predicted_peak_bytes < large.predicted_peak_bytes").mood == Statement::Mood::kGood);
  CHECK(verdict("small.predicted_step_s < 1.006 * large.predicted_step_s").mood == Statement::Mood::kGood);
  CHECK(verdict("small.predicted_step_s == small.predicted_step_s and small.predicted_peak_bytes < large.predicted_peak_bytes")
            .mood == Statement::Mood::kGood);
  const std::string near = "small.predicted_step_s < large.predicted_step_s";
  CHECK(verdict("small.parameter_bytes > large.parameter_bytes and " + near).mood == Statement::Mood::kBad);
  CHECK(verdict(near + " and small.parameter_bytes > large.parameter_bytes").mood == Statement::Mood::kBad);
  CHECK(verdict(near + " or small.parameter_bytes < large.parameter_bytes").mood == Statement::Mood::kGood);
}

TEST_CASE("a loss that a case did not reach takes longer than one that another did; of two such nothing is said") {
  std::vector<CaseOutcome> cases = two_cases();
  for (CaseOutcome& c : cases) {
    c.measured.emplace();
    c.measured->step_s = 1;
    c.measured->losses = c.config.name == "small" ? std::vector<double>{3, 2, 1} : std::vector<double>{3, 3, 3};
    c.loss_target = {.loss = 2, .mean_of = 1};
  }
  const auto judged = [&](const std::string& check) { return verdicts({{"a sentence", "a source", check, ""}}, cases).at(0).text; };
  const std::string figures = "small.measured_s_to_loss = 2.000 s, large.measured_s_to_loss = never.";
  CHECK(judged("small.measured_s_to_loss < large.measured_s_to_loss") ==
        "Holds here: \"a sentence\" (a source). Tested: small.measured_s_to_loss < large.measured_s_to_loss, where " + figures);
  CHECK(judged("large.measured_s_to_loss < small.measured_s_to_loss or small.measured_s_to_loss < 1")
            .starts_with("Does not hold here: "));
  for (CaseOutcome& c : cases) c.loss_target.loss = 0.5;
  CHECK(judged("large.steps_to_loss <= 1.05 * small.steps_to_loss") ==
        "Undecided: \"a sentence\" (a source). Not tested, since neither side reached its loss (large.steps_to_loss = never, "
        "small.steps_to_loss = never): give time_to_loss a higher one.");
  for (CaseOutcome& c : cases) c.loss_target.loss = 0;
  CHECK(judged("small.steps_to_loss < 3").find("since small has no steps_to_loss") != std::string::npos);
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
