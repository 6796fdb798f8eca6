// The running average of the weights: its bits are an emulation's under every layout, training does not see it, and it goes with a
// checkpoint to any other layout.
#include <limits>
#include <string>

#include "runtime/phases.h"
#include "tests/namespaces.h"
#include "tests/stability/training.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

constexpr float kDecay = 0.75f;

const Ranks kAveraged[] = {{},
                           {.tp = 2},
                           {.dp = 2, .zero = 1, .accumulation = 2},
                           {.dp = 4, .zero = 3},
                           {.pp = 2, .accumulation = 2, .recompute = Recompute::kFull},
                           {.dp = 2, .tp = 2, .pp = 2, .zero = 2, .accumulation = 2}};

Case averaged(Case c) {
  c.train.ema_decay = kDecay;
  return c;
}

using State = std::map<StateName, std::vector<float>>;

/// What `all` has of one part of the state, by parameter.
std::map<std::string, std::vector<float>> part(const State& all, std::string_view name) {
  std::map<std::string, std::vector<float>> found;
  for (const auto& [key, values] : all)
    if (key.part == name) found[key.parameter] = values;
  return found;
}

/// Averages in a loop.
class Averages {
 public:
  void take(const std::map<std::string, std::vector<float>>& values) {
    move(filled, 1);
    for (const auto& [name, value] : values) {
      averages[name].resize(value.size());
      for (size_t i = 0; i < value.size(); ++i) move(averages[name][i], value[i]);
    }
  }

  std::map<std::string, std::vector<float>> averages;
  float filled = 0;

 private:
  static void move(float& average, float value) { average -= (1 - kDecay) * (average - value); }
};

}  // namespace

TEST_CASE("averages of the weights have the bits of their emulation, and training does not see them", "[average]") {
  for (const Optimizer optimizer : {Optimizer::kAdamW, Optimizer::kSgd})
    for (const Ranks& ranks : kAveraged) {
      INFO(line_of(ranks));
      const Case c = stability_case(ranks, optimizer);
      Training with(averaged(c)), without(c);
      Averages emulation;
      for (int64_t i = 0; i < 4; ++i) {
        CHECK(with.step(i).loss == without.step(i).loss);
        emulation.take(part(without.state(), "value"));
        CHECK(part(with.state(), "ema") == emulation.averages);
      }
      CHECK(part(with.state(), "value") == part(without.state(), "value"));
      CHECK(part(with.state(), "m") == part(without.state(), "m"));
      CHECK(with.number("steps.averaged") == emulation.filled);
      CHECK(with.number("steps.averaged") == 1 - kDecay * kDecay * kDecay * kDecay);
    }
}

TEST_CASE("of 16-bit weights the copies in fp32 are averaged", "[average]") {
  Case c = averaged(stability_case({.dp = 2, .zero = 1}));
  c.train.precision = Precision::kBf16;
  Training training(c);
  Averages emulation;
  for (int64_t i = 0; i < 3; ++i) {
    training.step(i);
    emulation.take(part(training.state(), "master"));
  }
  CHECK(part(training.state(), "ema") == emulation.averages);
}

TEST_CASE("a step without an update leaves the average", "[average]") {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  Case c = averaged(stability_case({.dp = 2, .zero = 1}));
  c.train.guard.nonfinite = GuardAction::kSkip;
  Training training(c, {{.rank = 1, .step = 0, .value = kNaN}, {.rank = 0, .step = 2, .value = kNaN}});
  Averages emulation;
  CHECK(training.step(0).skipped);
  CHECK(training.number("steps.averaged") == 0);
  CHECK_FALSE(training.step(1).skipped);
  emulation.take(part(training.state(), "value"));
  CHECK(part(training.state(), "ema") == emulation.averages);
  CHECK(training.step(2).skipped);
  CHECK(part(training.state(), "ema") == emulation.averages);
  CHECK_FALSE(training.step(3).skipped);
  emulation.take(part(training.state(), "value"));
  CHECK(part(training.state(), "ema") == emulation.averages);
  CHECK(training.number("steps.averaged") == 1 - kDecay * kDecay);
}

TEST_CASE("an average goes on under another layout", "[average]") {
  Training whole(averaged(stability_case({}))), first(averaged(stability_case({.dp = 2, .zero = 3}))),
      second(averaged(stability_case({.tp = 2, .pp = 2, .accumulation = 2})));
  for (int64_t i = 0; i < 4; ++i) whole.step(i);
  for (int64_t i = 0; i < 2; ++i) first.step(i);
  const auto state = take_state(*first.session);
  REQUIRE(state.ok());
  REQUIRE(give_state(*state, *second.session).ok());
  for (int64_t i = 2; i < 4; ++i) second.step(i);
  CHECK(second.state() == whole.state());
}

}  // namespace shardlab::testing
