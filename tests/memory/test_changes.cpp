// What to change to fit: every proposal fits, keeps devices and tokens, and none that is cheaper was overlooked.
#include "simulator/estimator/memory/changes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "strategies/lower.h"
#include "tests/analytic/studies.h"
#include "tests/test.h"

namespace shardlab::simulator::whatif {
namespace {

using analytic::Estimate;
using analytic::Estimator;
using analytic::Point;
using analytic::Schedule;
using analytic::testing::gpt_175b;
using analytic::testing::llama_8b;
using analytic::testing::mixtral_8x7b;
using analytic::testing::study;

TEST_CASE("proposals fit, keep the devices and the tokens of a step, and are in order of time") {
  struct Question {
    analytic::ModelShape shape;
    const char* profile;
    int nodes;
    Point point;
  };
  const Question questions[] = {
      {llama_8b(), "megatron", 1, {.dp = 8, .micro_batch = 4}},
      {llama_8b(), "torchtitan", 1, {.dp = 8, .zero = 3, .micro_batch = 8, .seq_len = 8192}},
      {gpt_175b(), "megatron", 16, {.dp = 8, .tp = 8, .pp = 2, .schedule = Schedule::kAfab, .grad_accumulation = 4}},
      {mixtral_8x7b(), "megatron", 4, {.dp = 32, .zero = 1, .micro_batch = 2}}};
  constexpr int64_t kCapacity = 80'000'000'000;
  for (const Question& q : questions) {
    const analytic::Prepared prepared = study(q.shape, q.profile, q.nodes);
    Estimator estimator(prepared);
    const Estimate now = estimator(q.point);
    REQUIRE(now.legal());
    REQUIRE(now.memory.device() > kCapacity);
    const Advice advice = advise(estimator, prepared.profile(), q.point, {.capacity = kCapacity});
    INFO(q.profile << " of " << advice.looked_at);
    REQUIRE_FALSE(advice.changes.empty());
    double last = 0;
    for (const Change& c : advice.changes) {
      const Estimate e = estimator(c.point);
      INFO(text_of(c.words));
      CHECK(e.legal());
      CHECK(e.memory.device() == c.device_bytes);
      CHECK(static_cast<double>(c.device_bytes) <= 0.98 * kCapacity);
      CHECK(c.point.world_size() == q.point.world_size());
      CHECK(c.point.tokens_per_step() == q.point.tokens_per_step());
      CHECK(c.step_s == e.step_s);
      CHECK(c.slowdown == Approx(e.step_s / now.step_s - 1));
      CHECK(c.step_s >= last);
      CHECK(c.words == changed_words(q.point, c.point));
      last = c.step_s;
    }
    CHECK(advice.least.device_bytes <= advice.changes.front().device_bytes);
    // The fastest of single changes that fit is no faster than the first.
    for (int32_t zero = q.point.zero + 1; zero <= 3; ++zero) {
      Point single = q.point;
      single.zero = zero;
      const Estimate e = estimator(single);
      if (e.legal() && static_cast<double>(e.memory.device()) <= 0.98 * kCapacity) CHECK(e.step_s >= advice.changes.front().step_s);
    }
  }
}

TEST_CASE("where nothing fits, what comes nearest is named") {
  const analytic::Prepared prepared = study(gpt_175b(), "megatron", 1);
  Estimator estimator(prepared);
  const Advice advice = advise(estimator, prepared.profile(), {.dp = 8}, {.capacity = 8'000'000'000});
  CHECK(advice.changes.empty());
  CHECK(advice.looked_at > 50);
  CHECK(advice.least.device_bytes > 8'000'000'000);
  CHECK(advice.least.device_bytes < estimator({.dp = 8}).memory.device());
  CHECK_FALSE(advice.least.words.empty());
  CHECK(advise(estimator, prepared.profile(), {.dp = 7, .tp = 5}, {.capacity = 1}).looked_at == 0);  // no layout at all
}

TEST_CASE("shardlab's own proposals are layouts that it runs") {
  const analytic::Prepared prepared = study(llama_8b(), "shardlab", 1);
  Estimator estimator(prepared);
  const Point point{.dp = 8, .precision = Precision::kFp32, .micro_batch = 1};
  REQUIRE(estimator.executed(point) != nullptr);
  const auto lower = [](const Case& c) { return strategies::lower(c, {.after = {}, .verify = false}); };
  const Advice advice = advise(estimator, prepared.profile(), point, {.capacity = 80'000'000'000, .lower = lower});
  REQUIRE_FALSE(advice.changes.empty());
  for (const Change& c : advice.changes) {
    const Case* config = estimator.executed(c.point);
    REQUIRE(config != nullptr);
    const Prediction bytes = CasePlan::of(*config, lower)->bytes();
    CHECK(c.device_bytes == bytes.peak_bytes + static_cast<int64_t>(prepared.profile().memory.context));
    CHECK(c.device_bytes <= 80'000'000'000);
    CHECK(c.point.cp == 1);
  }
}

TEST_CASE("steps of changes are those of plans where these are short, else the estimate's in proportion to the layout's own") {
  const analytic::Prepared prepared = study(llama_8b(), "shardlab", 1);
  Estimator estimator(prepared);
  const auto lower = [](const Case& c) { return strategies::lower(c, {.after = {}, .verify = false}); };
  for (const int32_t micro_batches : {8, 9}) {  // of 32 layers
    const Point point{.dp = 8, .precision = Precision::kFp32, .micro_batch = 1, .grad_accumulation = micro_batches};
    REQUIRE(estimator.executed(point) != nullptr);
    int timed = 0;
    const auto seconds = [&](const Case&, const CasePlan&) { return ++timed, 1000.0; };
    const Advice advice =
        advise(estimator, prepared.profile(), point, {.capacity = 80'000'000'000, .lower = lower, .seconds = seconds});
    REQUIRE_FALSE(advice.changes.empty());
    CHECK(advice.scaled == (micro_batches == 9));
    CHECK((timed == 1) == advice.scaled);
    for (const Change& c : advice.changes) {
      const double of_plan = advice.scaled ? 1000 * estimator(c.point).step_s / estimator(point).step_s : 1000;
      CHECK(std::abs(c.step_s / of_plan - 1) < 1e-12);
      CHECK(std::abs(c.slowdown - (of_plan / 1000 - 1)) < 1e-12);
    }
  }
}

TEST_CASE("of a model of 16,384 layers few plans are made") {
  analytic::ModelShape deep = llama_8b();
  deep.layers = 16384;
  const analytic::Prepared prepared = study(deep, "shardlab", 1);
  Estimator estimator(prepared);
  const Point point{.dp = 8, .precision = Precision::kFp32, .micro_batch = 1};
  REQUIRE(estimator.executed(point) != nullptr);
  Case wide = *estimator.executed(point);  // whatever is asked for needs more than there is, so that no plan ends the search
  wide.model.layers = 1, wide.model.vocab = 200'000'000;
  std::set<std::string> asked;  // layouts, whatever their micro-batches
  const auto lower = [&](const Case& c) {
    const Layout& l = c.layout;
    asked.insert(fmt::format("{} {} {} {} {} {} {} {}", l.dp, l.tp, l.pp, l.zero, static_cast<int>(l.recompute),
                             static_cast<int>(l.offload.optimizer), static_cast<int>(l.offload.activations),
                             static_cast<int>(c.train.precision)));
    return strategies::lower(wide, {.after = {}, .verify = false});
  };
  const Advice advice = advise(estimator, prepared.profile(), point, {.capacity = 10'000'000'000'000, .lower = lower});
  CHECK(advice.looked_at > 50);
  CHECK(asked.size() <= 4);
  CHECK(advice.changes.empty());
}

TEST_CASE("words say what differs, in the words of the command line") {
  const Point a{.dp = 8, .tp = 2, .zero = 1};
  Point b = a;
  CHECK(changed_words(a, b).empty());
  b.dp = 2, b.pp = 4, b.schedule = Schedule::k1F1B, b.recompute.modules = analytic::Recompute::kLayer;
  b.offload_optimizer = analytic::Medium::kCpu, b.grad_accumulation = 4;
  CHECK(text_of(changed_words(a, b)) == "dp=2 pp=4 schedule=1f1b recompute=full offload=optimizer=cpu grad_accumulation=4");
  CHECK(text_of(changed_words(b, a)) == "dp=8 pp=1 recompute=none offload=none grad_accumulation=1 schedule=none");
}

}  // namespace
}  // namespace shardlab::simulator::whatif
