// The guard: what it finds is named, every rank leaves the update out, and a run without faults is the run without a guard.
#include <cmath>
#include <limits>

#include "tests/namespaces.h"
#include "tests/stability/training.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Case guarded(const Ranks& ranks, Guard guard) {
  Case c = stability_case(ranks);
  c.train.guard = guard;
  return c;
}

std::string refusal(const Case& c) {
  const auto checked = check(c);
  return checked.ok() ? "" : checked.error().message;
}

/// The state but for the run's own numbers.
std::map<StateName, std::vector<float>> of_parameters(const Training& training) {
  auto state = training.state();
  std::erase_if(state, [](const auto& entry) { return entry.first.parameter == kRunState; });
  return state;
}

const Ranks kLayouts[] = {{},
                          {.tp = 2},
                          {.dp = 2, .zero = 1, .accumulation = 2},
                          {.dp = 4, .zero = 3},
                          {.pp = 2, .accumulation = 2, .recompute = Recompute::kFull},
                          {.dp = 2, .tp = 2, .pp = 2, .zero = 2, .accumulation = 2}};

}  // namespace

TEST_CASE("a NaN on one rank is named by rank and tensor, and no rank updates", "[guard]") {
  for (const Ranks& ranks : kLayouts)
    for (const GuardAction action : {GuardAction::kSkip, GuardAction::kStop}) {
      const Case c = guarded(ranks, {.nonfinite = action});
      const int last = c.layout.world_size() - 1;
      CAPTURE(line_of(ranks), name_of(action));
      Training training(c, {{.rank = last, .step = 1, .value = kNaN}});
      const StepResult good = training.step(0);
      CHECK_FALSE(good.skipped);
      CHECK_FALSE(good.fault);
      const auto before = training.state();
      const StepResult bad = training.step(1);
      CHECK(bad.skipped);
      REQUIRE(bad.fault);
      CHECK(bad.fault->kind == Fault::Kind::kNonfinite);
      CAPTURE(bad.fault->text);
      CHECK(bad.fault->text.starts_with("rank " + std::to_string(last) + " has an infinity or a NaN in "));
      CHECK(training.state() == before);
      CHECK_FALSE(training.step(2).skipped);
    }
  Training named(guarded({}, {.nonfinite = GuardAction::kStop}), {{.rank = 0, .step = 0, .value = kNaN}});
  CHECK(named.step(0).fault->text == "rank 0 has an infinity or a NaN in embed.tokens.grad");
}

namespace {

/// Experts that two ranks share, each with gradients that no other rank has.
Case with_shared_experts(Case c, int zero) {
  c.model.family = Family::kLlama;
  c.model.kv_heads = c.model.heads;
  c.model.tied_embeddings = false;
  c.model.experts = {.count = 4, .top_k = 2, .ffn = 8};
  c.layout.ep = 2, c.layout.zero = zero;
  return c;
}

}  // namespace

TEST_CASE("a fault on one of the ranks that share experts is known to all, whatever is sharded", "[guard]") {
  for (const int zero : {0, 2, 3})
    for (const Ranks& ranks : {Ranks{.dp = 2}, {.dp = 4, .accumulation = 2}, {.dp = 2, .pp = 2, .accumulation = 2}}) {
      if (zero == 0 && ranks.dp > 2) continue;  // a sum that another rank has too would be planted in one copy alone
      const Case c = with_shared_experts(guarded(ranks, {.nonfinite = GuardAction::kSkip}), zero);
      const int last = c.layout.world_size() - 1;
      CAPTURE(line_of(ranks), zero);
      Training training(c, {{.rank = last, .step = 1, .value = kNaN}}), never(with_shared_experts(stability_case(ranks), zero));
      CHECK_FALSE(training.step(0).skipped);
      CHECK(*never.step(0).loss == *Training(c).step(0).loss);
      const auto before = training.state();
      const StepResult bad = training.step(1);
      CHECK(bad.skipped);
      REQUIRE(bad.fault);
      CHECK(bad.fault->text.starts_with("rank " + std::to_string(last) + " has an infinity or a NaN in "));
      CHECK(training.state() == before);
      CHECK_FALSE(training.step(2).skipped);
      CHECK(training.state() != before);
    }
}

TEST_CASE("a spike of the norm is judged alike by ranks that share experts", "[guard]") {
  for (const int zero : {0, 2}) {
    const Guard guard{.spike = GuardAction::kSkip, .loss_factor = 0, .norm_factor = 4, .window = 2};
    Training training(with_shared_experts(guarded({.dp = 2, .accumulation = 2}, guard), zero));
    CAPTURE(zero);
    for (int64_t i = 0; i < 4; ++i) CHECK_FALSE(training.step(i).skipped);
    CHECK(training.number("steps.applied") == 4);
    CHECK(training.number("guard.norm.seen") == 2);
  }
}

TEST_CASE("without a fault the guard changes no bit", "[guard]") {
  for (const Ranks& ranks : kLayouts) {
    INFO(line_of(ranks));
    Training with(guarded(ranks, {.nonfinite = GuardAction::kSkip, .spike = GuardAction::kSkip, .window = 2})),
        without(stability_case(ranks));
    for (int64_t i = 0; i < 4; ++i) {
      const StepResult a = with.step(i), b = without.step(i);
      CHECK_FALSE(a.skipped);
      CHECK(a.loss == b.loss);
    }
    CHECK(of_parameters(with) == of_parameters(without));
    CHECK(with.number("steps.applied") == 4);
  }
}

TEST_CASE("a loss beyond its running mean is a spike on every stage, and does not enter the mean", "[guard]") {
  for (const Ranks& ranks : {Ranks{}, Ranks{.dp = 2, .zero = 1}, Ranks{.pp = 2, .accumulation = 2}, Ranks{.tp = 2, .pp = 2}}) {
    const Case c = guarded(ranks, {.spike = GuardAction::kSkip, .loss_factor = 3, .norm_factor = 0, .window = 2});
    CAPTURE(line_of(ranks));
    std::vector<Plant> plants;
    for (int rank = 0; rank < c.layout.world_size(); ++rank) {
      plants.push_back({.rank = rank, .step = 1, .value = 100, .kernel = "judge_spike"});  // too early to be judged
      plants.push_back({.rank = rank, .step = 4, .value = 300, .kernel = "judge_spike"});
    }
    Training training(c, plants);
    std::vector<double> losses;
    for (int64_t i = 0; i < 4; ++i) {
      const StepResult r = training.step(i);
      CHECK_FALSE(r.skipped);
      losses.push_back(*r.loss);
    }
    CHECK(losses[1] == 100);
    // mean += (x - mean) / min(seen, 2), in fp32
    float mean = 0;
    for (size_t i = 0; i < losses.size(); ++i)
      mean += static_cast<float>((losses[i] - static_cast<double>(mean)) / static_cast<double>(std::min<size_t>(i + 1, 2)));
    CHECK(training.number("guard.loss.mean") == mean);
    CHECK(training.number("guard.loss.seen") == 2);
    const auto before = training.state();
    const StepResult spike = training.step(4);
    CHECK(spike.skipped);
    REQUIRE(spike.fault);
    CHECK(spike.fault->kind == Fault::Kind::kSpike);
    CHECK(spike.fault->text.find("the loss is 300, and its running mean") != std::string::npos);
    CHECK(training.state() == before);
    CHECK_FALSE(training.step(5).skipped);
  }
}

TEST_CASE("a gradient norm beyond its running mean is a spike, with clipping and a loss scale too", "[guard]") {
  for (const Ranks& ranks : {Ranks{}, Ranks{.dp = 2, .zero = 2}, Ranks{.tp = 2, .pp = 2}})
    for (const Precision precision : {Precision::kFp32, Precision::kBf16, Precision::kFp16})
      for (const float clip : {0.0f, 0.5f}) {
        Case c = guarded(ranks, {.spike = GuardAction::kSkip, .loss_factor = 0, .norm_factor = 1.0001f, .window = 1});
        c.train.precision = precision;
        c.train.clip_norm = clip;
        if (c.train.precision == Precision::kFp16) c.train.loss_scale = 1024;
        CAPTURE(line_of(ranks), name_of(precision), clip);
        Training training(c);
        float mean = 0, applied = 0;
        int skipped = 0;
        for (int64_t i = 0; i < 6; ++i) {
          const StepResult r = training.step(i);
          const double norm = std::sqrt(r.grad_norm2.value());
          const bool spike = i > 0 && norm > static_cast<double>(1.0001f) * static_cast<double>(mean);
          CHECK(r.skipped == spike);
          CHECK(r.fault.has_value() == spike);
          if (!spike) mean += static_cast<float>(norm - static_cast<double>(mean)), ++applied;
          skipped += spike;
          CHECK(training.number("guard.norm.mean") == mean);
          CHECK(training.number("steps.applied") == applied);
        }
        CHECK(skipped < 6);
      }
}

TEST_CASE("guards that guard nothing are refused", "[guard]") {
  CHECK(refusal(guarded({}, {.spike = GuardAction::kSkip, .loss_factor = 0.5f})) ==
        "guard.loss_factor=0.5: a spike is above the mean");
  CHECK(refusal(guarded({}, {.spike = GuardAction::kStop, .loss_factor = 0, .norm_factor = 0})) ==
        "guard.spike=stop with neither guard.loss_factor nor guard.norm_factor");
  CHECK(refusal(guarded({}, {.spike = GuardAction::kStop, .window = 0})) == "guard.window=0");
  Case c = guarded({}, {.nonfinite = GuardAction::kStop});
  CHECK(refusal(c).empty());
  c.train.precision = Precision::kFp16;
  CHECK(refusal(c).find("guard.nonfinite=stop with precision=fp16") == 0);
  c.train.precision = Precision::kFp32;
  c.backend = BackendKind::kCuda;
  c.transport = TransportKind::kOneGpu;
  CHECK(refusal(c).empty());
}

}  // namespace shardlab::testing
