// The one-step-delayed update: bits of an emulation in one process, bytes as planned, and updates beside the step.
#include <bit>
#include <cmath>
#include <optional>
#include <string>

#include "kernels/kernels.h"
#include "runtime/backend.h"
#include "runtime/session.h"
#include "runtime/thread_transport.h"
#include "simulator/cost_model.h"
#include "simulator/timeline.h"
#include "strategies/lower.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/reference/trainer.h"
#include "tests/offload/cases.h"
#include "tests/test.h"

namespace shardlab {
namespace {

using namespace testing;

constexpr Ranks kRanks[] = {
    {.accumulation = 2},
    {.dp = 2, .accumulation = 2},
    {.dp = 2, .zero = 1},
    {.dp = 2, .zero = 2, .accumulation = 2},
    {.dp = 2, .zero = 3},
    {.tp = 2, .accumulation = 2},
    {.dp = 2, .zero = 1, .pp = 2, .schedule = Schedule::k1F1B, .accumulation = 2},
};

Case delayed(Case c) {
  c.layout.offload.optimizer = OffloadTo::kCpu;
  c.layout.offload.delayed_update = true;
  c.layout.overlap = true;
  return c;
}

/// A case for every layout and family, optimizer and precision in turn.
template <class Visit>
void for_each_case(const Visit& visit) {
  int number = 0;
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const Ranks& ranks : kRanks) {
      Case c = small_case(family, 3);
      set(c, ranks);
      c.layout.bucket_bytes = ranks.zero == 3 ? 0 : 20000;
      c.model.tied_embeddings = number % 3 == 0;
      c.train.optimizer = number % 2 == 0 ? Optimizer::kSgd : Optimizer::kAdamW;
      if (number % 4 == 3) c.train.precision = "bf16";
      ++number;
      visit(delayed(std::move(c)));
    }
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(a, b, [](float x, float y) { return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y); });
}

std::vector<int32_t> tokens_of(const Case& c, int64_t step) {
  const RandomText text(c.model.vocab);
  const auto length = static_cast<size_t>(c.train.seq_len + 1);
  const int64_t sequences = c.sequences_per_step();
  std::vector<int32_t> tokens(static_cast<size_t>(sequences) * length);
  for (int64_t i = 0; i < sequences; ++i)
    text.sequence(step * sequences + i, std::span(tokens).subspan(static_cast<size_t>(i) * length, length));
  return tokens;
}

}  // namespace

TEST_CASE("delayed updates: the plan's bytes are the closed form's in every space, and what is measured is what was planned") {
  for_each_case([](const Case& c) {
    require_closed_form(c);
    require_measured_as_planned(c);
  });
}

TEST_CASE("delayed updates have the bits of an emulation that updates with the gradients of the step before") {
  for (const Subject& subject : subjects())
    for (const Ranks& ranks : {Ranks{.accumulation = 2}, Ranks{.dp = 2}, Ranks{.dp = 2, .zero = 1}, Ranks{.dp = 2, .zero = 2}}) {
      if (subject.name != "llama sgd" && subject.name != "llama adamw" && subject.name != "gpt tied adamw") continue;
      Case c;
      set(c, ranks);
      c.canonical = true;
      c = rows_of(subject, std::span(&c, 1)).at(0);
      c.train.grad_norm = false;
      if (c.train.optimizer == Optimizer::kSgd) c.train.learning_rate.peak = 0.25f;
      c = delayed(c);
      INFO(subject.name << " " << line_of(c));
      auto plan = lower(c);
      INFO((plan.ok() ? "" : to_string(plan.error())));
      REQUIRE(plan.ok());
      const PlacedPlan placed = place(std::move(*plan));
      const Kernels& kernels = kernels_for_this_processor();
      ThreadTransport transport(kernels);
      const RandomText text(c.model.vocab);
      RunOptions options;
      options.seed = c.train.seed;
      options.learning_rate = c.train.learning_rate;
      options.poison = true;
      auto session = Session::create(placed, options, transport, cpu_backend(kernels, {true, 1}), &text);
      REQUIRE(session.ok());
      (*session)->initialise_parameters();
      reference::Trainer<float> trainer(c.model, c.train, c.sequences_per_step());
      std::optional<reference::Tensors<float>> waiting;
      float first = 0, last = 0;
      for (int step = 0; step < 5; ++step) {
        const StepResult result = (*session)->step(step);
        auto here = trainer.gradients(tokens_of(c, step));
        INFO("step " << step);
        REQUIRE(std::isfinite(here.nll));
        REQUIRE(static_cast<float>(*result.loss) == here.nll);
        CHECK(result.skipped == (step == 0));
        if (waiting) trainer.update(*waiting);
        waiting = std::move(here.gradients);
        for (const ModelParameter& p : trainer.parameters()) {
          INFO(p.name);
          const auto value = (*session)->parameter(p.name);
          REQUIRE(value.ok());
          REQUIRE(same_bits(value->values, trainer.value(p.name)));
        }
        (step == 0 ? first : last) = here.nll;
      }
      CHECK(first != last);
    }
}

namespace {

/// The host takes long over an update.
class SlowHost final : public PlacedCostModel {
 public:
  Seconds compute(const Plan&, const Instruction& i, int) const override { return Seconds(i.op->label == "update" ? 20 : 1); }
  Seconds communicate(const Plan&, const Instruction&, int) const override { return Seconds(1); }
  Seconds dispatch() const override { return Seconds(0); }
  Seconds wake() const override { return Seconds(0); }
};

}  // namespace

TEST_CASE("delayed updates run beside the step, where they would follow backward") {
  Case c = small_case(Family::kLlama, 4);
  c.layout.bucket_bytes = 20000;
  const Case late = delayed(c);
  Case now = late;
  now.layout.offload.delayed_update = false;
  Machine machine;
  machine.devices_per_node = 1;
  const auto simulated = [&](const Case& config) {
    const PlacedPlan placed = place(plan_of(config));
    const Trace trace = simulate(*placed.plan, placed.programs, machine, SlowHost());
    double first = 1e9, backward = 1e9;
    for (const TraceEvent& e : trace.events) {
      const Instruction& i = placed.programs[0].instructions[static_cast<size_t>(e.instruction)];
      if (e.kind != TraceEvent::Kind::kOp || i.op == nullptr) continue;
      if (i.op->label == "update") first = std::min(first, e.begin);
      if (phase_of(i.op->work) == Phase::kW) backward = std::min(backward, e.begin);
    }
    return std::array{step_seconds(trace), first, backward};
  };
  const auto a = simulated(late), b = simulated(now);
  CHECK(a[1] == 0);    // with the step
  CHECK(b[1] > b[2]);  // after the first gradient
  CHECK(a[0] < b[0]);
}

TEST_CASE("delayed updates are refused where they could not run beside the step, with what to do instead") {
  Case c = delayed(small_case(Family::kGpt));
  const Case good = c;
  const auto refused = [&](std::string_view words) {
    const Result<void> checked = check(c);
    REQUIRE_FALSE(checked.ok());
    CHECK(to_string(checked.error()).find(words) != std::string::npos);
    c = good;
  };
  REQUIRE(check(c).ok());
  c.layout.overlap = false;
  refused("delayed_update with overlap=false");
  c.layout.offload.optimizer = OffloadTo::kNvme;
  refused("delayed_update with offload.optimizer=nvme");
  c.checkpoint.save_every = 2;
  refused("delayed_update with checkpoint");
  c.layout.offload.optimizer = OffloadTo::kNone;
  refused("offload.delayed_update without offload.optimizer");
}

}  // namespace shardlab
