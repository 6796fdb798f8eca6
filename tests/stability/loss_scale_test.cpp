// fp16 with a loss scale: every layout takes the same decisions and comes to the same bits, and a step that is skipped leaves
// nothing behind.
#include <cmath>
#include <filesystem>
#include <limits>

#include "runtime/checkpoint.h"
#include "tests/namespaces.h"
#include "tests/stability/training.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

Case fp16_case(const Ranks& ranks, Optimizer optimizer = Optimizer::kAdamW) {
  Case c = stability_case(ranks, optimizer);
  c.train.precision = Precision::kFp16;
  return c;
}

/// What a step came to, to the bit.
struct Seen {
  double loss = 0;
  bool skipped = false;
  double scale = 0;
  friend bool operator==(const Seen&, const Seen&) = default;
};

std::vector<Seen> run(Training& training, int64_t steps) {
  std::vector<Seen> seen;
  for (int64_t i = 0; i < steps; ++i) {
    const StepResult r = training.step(i);
    REQUIRE(r.loss);
    seen.push_back({*r.loss, r.skipped, r.loss_scale.value_or(training.config.train.loss_scale)});
  }
  return seen;
}

/// The scale after each step by the published rule (Micikevicius et al. 2018, section 3.2): halved after an overflow, doubled after
/// `interval` steps in a row without one.
std::vector<double> scales_by_rule(double scale, int64_t interval, const std::vector<Seen>& seen) {
  std::vector<double> scales;
  int64_t good = 0;
  for (const Seen& s : seen) {
    good = s.skipped ? 0 : good + 1;
    if (s.skipped) scale /= 2;
    if (good == interval) scale *= 2, good = 0;
    scales.push_back(std::clamp(scale, 1.0, 16777216.0));
  }
  return scales;
}

}  // namespace

TEST_CASE("a dynamic scale falls until nothing overflows, grows again, and every layout decides alike", "[fp16]") {
  constexpr int64_t kSteps = 12;
  const auto dynamic = [](const Ranks& ranks) {
    Case c = fp16_case(ranks);
    c.train.loss_scale_start = 16777216;  // far beyond what fp16 holds
    c.train.loss_scale_interval = 3;
    c.train.clip_norm = 0.5f;
    return c;
  };
  Training one(dynamic({}));
  const std::vector<Seen> expected = run(one, kSteps);
  std::vector<double> scales;
  int64_t skipped = 0;
  for (const Seen& s : expected) {
    REQUIRE(std::isfinite(s.loss));
    scales.push_back(s.scale);
    skipped += s.skipped;
  }
  REQUIRE(expected.front().skipped);
  REQUIRE(skipped > 1);
  REQUIRE(skipped < kSteps - 3);
  CHECK(scales == scales_by_rule(16777216, 3, expected));
  CHECK(one.number("steps.applied") == static_cast<float>(kSteps - skipped));
  CHECK(expected.back().loss < expected.front().loss);

  for (const Ranks& ranks : {Ranks{.dp = 2}, Ranks{.dp = 4, .zero = 1}, Ranks{.dp = 2, .zero = 2, .accumulation = 2},
                             Ranks{.dp = 4, .zero = 3}, Ranks{.pp = 2, .accumulation = 4, .recompute = Recompute::kFull},
                             Ranks{.dp = 2, .pp = 2, .zero = 1, .accumulation = 2, .recompute = Recompute::kSelective}}) {
    INFO(line_of(ranks));
    Training many(dynamic(ranks));
    CHECK(run(many, kSteps) == expected);
    CHECK(many.state() == one.state());
  }
  // Tensor parallel sums of activations are rounded once more, so that its numbers are its own; its ranks still decide as one.
  for (const Ranks& ranks : {Ranks{.tp = 2}, Ranks{.dp = 2, .tp = 2, .pp = 2, .zero = 1, .accumulation = 2}}) {
    INFO(line_of(ranks));
    Training many(dynamic(ranks));
    const std::vector<Seen> seen = run(many, kSteps);
    std::vector<double> moved;
    for (const Seen& s : seen) moved.push_back(s.scale);
    CHECK(moved == scales_by_rule(16777216, 3, seen));
    CHECK(std::abs(seen.front().loss - expected.front().loss) < 0.01 * expected.front().loss);
    many.state();  // every replica, of numbers of the run too, is compared bit for bit
  }
}

TEST_CASE("an overflow on one rank skips the step on all, which leaves nothing but a smaller scale", "[fp16]") {
  for (const Ranks& ranks : {Ranks{.tp = 2}, Ranks{.dp = 2, .zero = 1}, Ranks{.dp = 2, .zero = 3},
                             Ranks{.pp = 2, .accumulation = 2}, Ranks{.dp = 2, .tp = 2, .pp = 2, .zero = 2, .accumulation = 2}})
    for (const float value : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      Case c = fp16_case(ranks);
      c.train.loss_scale_start = 1024;
      const int last = c.layout.world_size() - 1;
      CAPTURE(line_of(ranks), value, last);
      Training training(c, {{.rank = last, .step = 1, .value = value}});
      REQUIRE_FALSE(training.step(0).skipped);
      const auto before = training.state();
      const StepResult bad = training.step(1);
      CHECK(bad.skipped);
      CHECK(bad.loss_scale == 512);
      for (const auto& [name, values] : training.state()) {
        CAPTURE(name.parameter, name.part);
        if (name.parameter != kRunState) CHECK(values == before.at(name));
      }
      CHECK(training.number("steps.applied") == 1);
      CHECK(training.number("loss_scale.good") == 0);
      const StepResult next = training.step(2);
      CHECK_FALSE(next.skipped);
      CHECK(training.number("steps.applied") == 2);
      CHECK(training.number("loss_scale.good") == 1);
    }
}

TEST_CASE("an overflow on one of the ranks that share experts skips the step on all, whatever is sharded", "[fp16]") {
  for (const int zero : {0, 2, 3}) {
    Case c = fp16_case({.dp = 2, .accumulation = 2});
    c.model.family = Family::kLlama;
    c.model.kv_heads = c.model.heads;
    c.model.tied_embeddings = false;
    c.model.experts = {.count = 4, .top_k = 2, .ffn = 8};
    c.layout.ep = 2, c.layout.zero = zero;
    c.train.loss_scale_start = 1024;
    CAPTURE(zero);
    Training training(c, {{.rank = 1, .step = 1, .value = kInfinity}});
    REQUIRE_FALSE(training.step(0).skipped);
    const auto before = training.state();
    const StepResult bad = training.step(1);
    CHECK(bad.skipped);
    CHECK(bad.loss_scale == 512);
    for (const auto& [name, values] : training.state())
      if (name.parameter != kRunState) CHECK(values == before.at(name));
    CHECK(training.number("steps.applied") == 1);
    CHECK_FALSE(training.step(2).skipped);
  }
}

TEST_CASE("bias correction and the learning rate go by updates made, not by steps", "[fp16]") {
  // The run that skipped step 1 and the run that never saw it come to the same bits.
  for (const Ranks& ranks : {Ranks{}, Ranks{.dp = 2, .zero = 1}, Ranks{.pp = 2}}) {
    Case c = fp16_case(ranks);
    c.train.loss_scale = 256;
    c.train.learning_rate = {
        .kind = LearningRate::Kind::kCosine, .peak = 0.01f, .warmup_steps = 2, .total_steps = 5, .floor = 0.001f};
    INFO(line_of(ranks));
    Training skips(c, {{.rank = 0, .step = 1, .value = kInfinity}}), never(c);
    for (const int64_t step : {0, 1, 2, 3}) CHECK(skips.step(step).skipped == (step == 1));
    for (const int64_t step : {0, 2, 3}) CHECK_FALSE(never.step(step).skipped);
    CHECK(skips.state() == never.state());
  }
}

TEST_CASE("a fixed scale of any power of two is the same training, until fp16 under- or overflows", "[fp16]") {
  const auto trained = [](float scale, Optimizer optimizer) {
    Case c = fp16_case({}, optimizer);
    c.train.loss_scale = scale;
    c.train.grad_norm = true;
    Training training(c);
    std::vector<double> norms;
    for (int64_t i = 0; i < 3; ++i) {
      const StepResult r = training.step(i);
      REQUIRE_FALSE(r.skipped);
      norms.push_back(r.grad_norm2.value());
    }
    return std::pair{norms, training.state()};
  };
  for (const Optimizer optimizer : {Optimizer::kSgd, Optimizer::kAdamW}) {
    const auto [norms, state] = trained(512, optimizer);
    const auto [unscaled_norms, unscaled] = trained(1, optimizer);
    for (size_t i = 0; i < norms.size(); ++i) {  // the norm is that of the unscaled gradient
      CHECK(norms[i] > 0);
      CHECK(std::abs(norms[i] - unscaled_norms[i]) < 0.02 * norms[i]);
    }
    CHECK(state != unscaled);  // some gradients underflow without a scale
    CHECK(trained(1024, optimizer).first.front() == Approx(norms.front()).epsilon(1e-4));
  }
}

TEST_CASE("a scale keeps gradients that fp16 would lose, and comes nearer to fp32", "[fp16]") {
  const auto parameters_after = [](Precision precision, float scale) {
    // Most of 2048 tokens' gradients of 1024 logits are some 5e-7, of which fp16 keeps three bits.
    Case c = stability_case({}, Optimizer::kSgd);
    c.model.vocab = 1024;
    c.model.max_positions = c.train.seq_len = 256;
    c.train.precision = precision;
    c.train.loss_scale = scale;
    Training training(c);
    training.step(0);
    std::map<std::string, std::vector<float>> values;
    for (const Parameter& p : training.placed.plan->parameters) values[p.name] = training.session->parameter(p.name)->values;
    return values;
  };
  const auto distance = [](const auto& a, const auto& b) {
    double sum = 0;
    for (const auto& [name, values] : a)
      for (size_t i = 0; i < values.size(); ++i) sum += std::pow(double{values[i]} - double{b.at(name)[i]}, 2);
    return std::sqrt(sum);
  };
  const auto wide = parameters_after(Precision::kFp32, 0);
  CHECK(distance(wide, parameters_after(Precision::kFp16, 1024)) < distance(wide, parameters_after(Precision::kFp16, 1)));
}

TEST_CASE("checkpoints carry the scale, its count and the updates made from one layout to another", "[fp16][checkpoint]") {
  const auto dynamic = [](const Ranks& ranks) {
    Case c = fp16_case(ranks);
    c.train.loss_scale_start = 4194304;
    c.train.loss_scale_interval = 2;
    c.train.learning_rate = {.kind = LearningRate::Kind::kLinear, .peak = 0.01f, .warmup_steps = 2, .total_steps = 8};
    return c;
  };
  std::string folder = (std::filesystem::temp_directory_path() / "shardlab-loss-scale-XXXXXX").string();
  REQUIRE(mkdtemp(folder.data()) != nullptr);
  Training alone(dynamic({}));
  const Ranks layouts[] = {{}, {.dp = 2, .zero = 1}, {.pp = 2, .accumulation = 2}, {.dp = 4, .zero = 3}, {.dp = 2, .zero = 2}, {}};
  int64_t steps = 0, skipped = 0;
  for (const Ranks& ranks : layouts) {
    CAPTURE(line_of(ranks), steps);
    Training next(dynamic(ranks));
    if (steps > 0) {
      const auto checkpoint = Checkpoint::open(folder);
      REQUIRE(checkpoint.ok());
      REQUIRE(checkpoint->restore(next.config, *next.session).ok());
    }
    for (int i = 0; i < 2; ++i, ++steps) {
      const StepResult want = alone.step(steps), have = next.step(steps);
      skipped += want.skipped;
      CHECK(have.loss == want.loss);
      CHECK(have.skipped == want.skipped);
      CHECK(have.loss_scale == want.loss_scale);
    }
    REQUIRE(next.state() == alone.state());
    REQUIRE(save_checkpoint(*next.session, next.config, steps, folder).ok());
  }
  CHECK(skipped > 0);
  CHECK(skipped < steps);

  // What is not kept is not silently begun anew.
  Case fixed = dynamic({});
  fixed.train.loss_scale = 1024;
  Training other(fixed);
  const auto refused = Checkpoint::open(folder)->restore(fixed, *other.session);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().message.find("loss_scale") != std::string::npos);
  std::filesystem::remove_all(folder);
}

}  // namespace shardlab::testing
