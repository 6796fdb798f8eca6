// Periods that are taken back: the state is what it was, to the bit, and the steps made again end as they do where all stages meet.
#include <limits>

#include "runtime/made_again.h"
#include "tests/namespaces.h"
#include "tests/stability/training.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

constexpr float kNoNumber = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kPeriod = 3;

const Ranks kStaged[] = {{.pp = 2, .accumulation = 2},
                         {.dp = 2, .pp = 2, .zero = 1, .accumulation = 2},
                         {.dp = 2, .tp = 2, .pp = 2, .zero = 2, .accumulation = 2},
                         {.dp = 2, .pp = 2, .zero = 3, .accumulation = 2}};

Case later(const Ranks& ranks) {
  Case c = stability_case(ranks);
  c.train.post_validation = kPeriod;
  return c;
}

Case in_step(Case c) {
  c.train.post_validation = 0;
  return c;
}

}  // namespace

TEST_CASE("a NaN takes its period back, and the step ends as the guard ends it where all stages meet", "[post_validation]") {
  for (const Ranks& ranks : kStaged) {
    Case c = later(ranks);
    c.train.guard.nonfinite = GuardAction::kSkip;
    INFO(line_of(ranks));
    const std::vector<Plant> plants{{.rank = c.layout.world_size() - 1, .step = kPeriod, .value = kNoNumber}};
    Training optimistic(c, plants), again(in_step(c), plants), meeting(in_step(c), plants);
    const InStep make = [&]() -> Result<Session*> { return again.session.get(); };
    const auto first = run_judged(*optimistic.session, 0, make);
    REQUIRE(first.ok());
    CHECK(first->again.empty());
    CHECK(optimistic.number("steps.applied") == kPeriod);
    const auto before = optimistic.state();
    const StepResult bad = optimistic.step(kPeriod);
    CHECK(bad.rolled_back);
    CHECK_FALSE(bad.skipped);
    CHECK((optimistic.state() == before));  // parameters, moments and the count of steps
    const auto second = run_judged(*optimistic.session, kPeriod, make);
    REQUIRE(second.ok());
    REQUIRE(std::ssize(second->again) == kPeriod);
    const auto third = run_judged(*optimistic.session, 2 * kPeriod, make);
    REQUIRE(third.ok());
    CHECK(third->again.empty());
    for (int64_t i = 0; i < 3 * kPeriod; ++i) {
      const StepResult want = meeting.step(i);
      CHECK(want.skipped == (i == kPeriod));
      if (i / kPeriod != 1) {
        const StepResult& have = i < kPeriod ? first->first : third->first;
        CHECK(have.losses[static_cast<size_t>(i % kPeriod)] == want.loss);
        continue;
      }
      const StepResult& have = second->again[static_cast<size_t>(i - kPeriod)];
      CHECK(have.loss == want.loss);
      CHECK(have.skipped == want.skipped);
      CHECK(have.fault.has_value() == want.fault.has_value());
      if (have.fault && want.fault) CHECK(have.fault->text == want.fault->text);
    }
    CHECK((optimistic.state() == meeting.state()));
    CHECK(optimistic.number("steps.applied") == 3 * kPeriod - 1);
  }
}

TEST_CASE("a step that was to be clipped takes its period back, moments and all", "[post_validation]") {
  for (const Ranks& ranks : kStaged) {
    Case never = later(ranks);
    never.train.clip_norm = 1e6f;
    Case always = never;
    always.train.clip_norm = 1e-3f;
    INFO(line_of(ranks));
    Training moved(never), held(always);
    CHECK_FALSE(moved.step(0).rolled_back);
    const auto state = moved.state();
    for (const auto& [name, values] : state) REQUIRE(held.session->set_state(name, *moved.session->state(name)).ok());
    CHECK((held.state() == state));
    CHECK(held.step(kPeriod).rolled_back);
    CHECK((held.state() == state));
    CHECK_FALSE(moved.step(kPeriod).rolled_back);
    CHECK_FALSE(moved.state() == state);
  }
}

}  // namespace shardlab::testing
