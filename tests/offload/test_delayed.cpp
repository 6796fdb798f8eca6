// Tier E3: the one-step-delayed update has the bits of an emulation in one process, and bytes as planned; updates run beside the
// step.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/memory.h"
#include "plan/verify.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/timeline.h"
#include "strategies/lower.h"
#include "tests/deal.h"
#include "tests/laws/refusals.h"
#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/reference/trainer.h"
#include "tests/numerics/running.h"
#include "tests/numerics/train_case.h"
#include "tests/offload/cases.h"
#include "tests/test.h"

namespace shardlab::testing::of_delayed {
namespace {

using namespace testing;

constexpr Ranks kRanks[] = {
    {},
    {.accumulation = 2},
    {.dp = 2, .accumulation = 2},
    {.dp = 2, .zero = 1},
    {.dp = 2, .zero = 2, .accumulation = 4},
    {.dp = 2, .zero = 3, .accumulation = 2},
    {.tp = 2, .accumulation = 2},
    {.pp = 2, .schedule = Schedule::kAfab, .accumulation = 2},
    {.dp = 2, .zero = 1, .tp = 2, .pp = 2, .schedule = Schedule::k1F1B, .accumulation = 2},
};

Case delayed(Case c) {
  c.layout.offload.optimizer = OffloadTo::kCpu;
  c.layout.offload.delayed_update = true;
  c.layout.overlap = true;
  return c;
}

/// Calls `visit` with a case for every family, layout, tie, precision, bucket and bound of the norm.
template <class Visit>
void for_each_case(const Visit& visit) {
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const Ranks& ranks : kRanks)
      for (const bool tied : {false, true})
        for (const char* precision : {"fp32", "bf16", "bf16 gradients"})
          for (const int64_t bucket_bytes : {0, 20000})
            for (const float clip_norm : {0.0f, 0.05f}) {
              Case c = small_case(family, 3);
              set(c, ranks);
              c.model.tied_embeddings = tied;
              c.train.precision = precision[0] == 'b' ? Precision::kBf16 : Precision::kFp32;
              if (precision == std::string("bf16 gradients")) c.train.accumulate_dtype = "bf16";
              c.layout.bucket_bytes = c.layout.zero == 3 ? 0 : bucket_bytes;  // whose buckets are units
              c.train.clip_norm = clip_norm;
              visit(delayed(std::move(c)));
            }
}

/// What changes how gradients travel, what is kept outside the device, or what is in 8 bits.
struct Mix {
  const char* name;
  void (*set)(Case&);
};
constexpr Mix kMixes[] = {
    {"int8", [](Case& c) { c.layout.dp = 2, c.layout.compression.kind = CompressionKind::kInt8; }},
    {"top-k", [](Case& c) { c.layout.dp = 2, c.layout.compression = {.kind = CompressionKind::kTopK, .k = 0.1}; }},
    {"hybrid", [](Case& c) { c.layout.dp = 4, c.layout.zero = 3, c.layout.hybrid_shard = 2; }},
    {"secondary shard", [](Case& c) { c.layout.dp = 4, c.layout.zero = 3, c.layout.zero_plus_plus.secondary = 2; }},
    {"servers", [](Case& c) { c.layout.dp = 2, c.layout.parameter_server.servers = 2; }},
    {"activations on the host", [](Case& c) { c.layout.offload.activations = OffloadTo::kCpu; }},
    {"activations on nvme", [](Case& c) { c.layout.offload.activations = OffloadTo::kNvme; }},
    {"recompute", [](Case& c) { c.layout.recompute = Recompute::kFull, c.layout.recompute_options.every = 2; }},
    {"canonical accumulation", [](Case& c) { c.canonical = true, c.layout.dp = 2, c.train.grad_accumulation = 4; }},
    {"fp8", [](Case& c) { c.train.precision = Precision::kFp8, c.train.fp8_scaling = Fp8Scaling::kDelayed, c.layout.dp = 2; }},
    {"norm", [](Case& c) { c.train.grad_norm = true, c.layout.dp = 2, c.layout.zero = 1, c.layout.tp = 2; }},
};

template <class Visit>
void for_each_mix(const Visit& visit) {
  for (const Mix& mix : kMixes) {
    INFO(mix.name);
    Case c = small_case(Family::kGpt, 4);
    mix.set(c);
    visit(delayed(std::move(c)));
  }
}

}  // namespace

TEST_CASE("delayed updates: the plan's bytes are its replay's in every space") {
  for_each_case(require_replayed);
  for_each_mix([](Case c) {
    require_replayed(c);
    c.layout.offload.delayed_update = false;
    require_replayed(c);
  });
}

TEST_CASE("delayed updates: no byte more in any space than without delay, but for two numbers") {
  uint64_t number = 0;
  for_each_case([&](const Case& late) {
    if (number++ % dealt(5, 43) != 0) return;
    Case now = late;
    now.layout.offload.delayed_update = false;
    const Plan a = plan_of(late), b = plan_of(now);
    for (size_t stage = 0; stage < a.roles.size(); ++stage)
      for (const Space space : {Space::kDevice, Space::kHost}) {
        const auto peak = [&](const Plan& plan) {
          return memory_peak(plan, static_cast<int>(stage))[static_cast<size_t>(space)].peak_bytes;
        };
        CHECK(peak(a) == peak(b) + 64);  // updates made; steps begun
      }
  });
}

TEST_CASE("delayed updates: what is measured is what was planned") {
  uint64_t number = 0;
  for_each_case([&](const Case& c) {
    if (number++ % dealt(7, 53) == 0) require_measured_as_planned(c);
  });
  for_each_mix(require_measured_as_planned);
}

TEST_CASE("delayed updates have the bits of an emulation that updates with the gradients of the step before") {
  uint64_t number = 0;
  constexpr Ranks kLayouts[] = {
      {.accumulation = 2}, {.dp = 2}, {.dp = 2, .zero = 1}, {.dp = 2, .zero = 2, .accumulation = 2}, {.dp = 2, .zero = 3}};
  for (const char* name :
       {"llama sgd", "llama adamw", "gpt tied adamw", "gpt tied clipped, 16 sequences sgd", "gpt tied clipped, 16 sequences adamw"})
    for (const Ranks& ranks : kLayouts) {
      if (number++ % dealt(2, 12) != 0) continue;  // each layout, under some of the five
      Case c = base_case(name, ranks.dp, static_cast<int>(ranks.accumulation));
      c.layout.zero = ranks.zero;
      c.train.guard = {};
      c.train.grad_norm = true;
      c.train.learning_rate.warmup_steps = 3;  // whose rate is that of updates, not of steps
      if (c.train.optimizer == Optimizer::kSgd) c.train.learning_rate.peak = 0.25f;
      c = delayed(c);
      INFO(name << " " << offload_line(c));
      Running run(c);
      reference::Trainer<float> trainer(c.model, c.train, c.sequences_per_step());
      std::optional<reference::Tensors<float>> waiting;
      float first = 0, last = 0;
      for (int step = 0; step < 6; ++step) {
        INFO("step " << step);
        const StepResult result = run.session->step(step);
        auto here = trainer.gradients(tokens_of(c, step));
        REQUIRE(std::isfinite(here.nll));
        REQUIRE(static_cast<float>(*result.loss) == here.nll);
        CHECK(result.skipped == (step == 0));
        double squares = 0;  // of this step's gradients, by which the next step's updates are clipped
        for (const auto& gradient : here.gradients)
          for (const float g : gradient) squares += static_cast<double>(g) * static_cast<double>(g);
        CHECK(*result.grad_norm2 == Approx(squares).epsilon(1e-12));
        if (waiting) trainer.update(*waiting);
        waiting = std::move(here.gradients);
        for (const ModelParameter& p : trainer.parameters()) {
          INFO(p.name);
          const auto value = run.session->parameter(p.name);
          REQUIRE(value.ok());
          REQUIRE(same_bits(value->values, trainer.value(p.name)));
        }
        (step == 0 ? first : last) = here.nll;
      }
      CHECK(first != last);
      run.require_counts();
    }
}

/// The first gradients are of the parameters that every run begins with, so the first update is the same, a step later.
TEST_CASE("delayed updates begin as updates without delay do, in every precision and however gradients travel") {
  const auto same_first_update = [](const Case& late) {
    Case now = late;
    now.layout.offload.delayed_update = false;
    INFO(offload_line(late));
    const RandomText text(late.model.vocab);
    const auto none = train_case(late, text, 1), two = train_case(late, text, 2), one = train_case(now, text, 1);
    REQUIRE((none.ok() && two.ok() && one.ok()));
    CHECK(two->losses.front() == one->losses.front());
    for (const auto& [name, values] : one->parameters) {
      INFO(name);
      CHECK(same_bits(two->parameters.at(name), values));
    }
    CHECK(none->parameters != one->parameters);
  };
  uint64_t number = 0;
  for_each_case([&](const Case& c) {
    if (number++ % dealt(9, 71) == 0) same_first_update(c);
  });
  for_each_mix(same_first_update);
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

/// When a step is over, its first update begins, and its first and its last weight gradient.
struct Moments {
  double over = 0, update = 1e9, first_gradient = 1e9, last_gradient = 0;
};

Moments simulated(const Case& c) {
  Machine machine;
  machine.devices_per_node = 1;
  const PlacedPlan placed = place(plan_of(c));
  const Trace trace = simulate(*placed.plan, placed.programs, machine, SlowHost());
  Moments m{.over = step_seconds(trace)};
  for (const TraceEvent& e : trace.events) {
    const Instruction& i = placed.programs[0].instructions[static_cast<size_t>(e.instruction)];
    if (e.kind != TraceEvent::Kind::kOp || i.op == nullptr) continue;
    if (i.op->label == "update") m.update = std::min(m.update, e.begin);
    if (phase_of(i.op->work) != Phase::kW) continue;
    m.first_gradient = std::min(m.first_gradient, e.begin);
    m.last_gradient = std::max(m.last_gradient, e.begin);
  }
  return m;
}

}  // namespace

TEST_CASE("delayed updates run beside the step, where they would follow backward") {
  for (const float clip_norm : {0.0f, 1.0f}) {
    Case c = small_case(Family::kLlama, 4);
    c.layout.bucket_bytes = 20000;
    c.train.clip_norm = clip_norm;
    const Case late = delayed(c);
    Case now = late;
    now.layout.offload.delayed_update = false;
    const Moments beside = simulated(late), behind = simulated(now);
    CHECK(beside.update == 0);
    CHECK(behind.update > (clip_norm > 0 ? behind.last_gradient : behind.first_gradient));
    CHECK(beside.over < behind.over);
  }
}

namespace {

/// The calls of a program that run an op of that label and kind of work.
template <class W>
std::vector<size_t> calls_of(const Plan& plan, std::string_view label) {
  std::vector<size_t> found;
  const auto& program = plan.roles[0].program;
  for (size_t i = 0; i < program.size(); ++i) {
    const Call* call = std::get_if<Call>(&program[i]);
    if (call == nullptr) continue;
    const Op* op = std::get_if<Op>(&plan.segments[call->segment.index()].steps.front());
    if (op != nullptr && op->label == label && std::holds_alternative<W>(op->work)) found.push_back(i);
  }
  return found;
}

}  // namespace

TEST_CASE("delayed updates: verify holds what waits for the next step, and its factor, to what updates demand") {
  Case c = small_case(Family::kGpt, 3);
  c.layout.bucket_bytes = 20000;
  c.train.clip_norm = 1;
  const Plan good = plan_of(delayed(c));
  const auto updates = calls_of<AdamW>(good, "update"), arrivals = calls_of<Copy>(good, "offload"),
             factors = calls_of<Copy>(good, "clip.factor");
  REQUIRE(factors.size() == 1);
  REQUIRE(updates.size() == arrivals.size());
  REQUIRE(updates.back() < arrivals.front());
  REQUIRE(arrivals.back() < factors.front());
  using Program = std::vector<Item>;
  const auto is_found = [&](std::string_view words, const auto& change) {
    Plan plan = good;
    change(plan.roles[0].program);
    return std::ranges::any_of(find_faults(plan), [&](const Finding& f) { return f.message.find(words) != std::string::npos; });
  };
  const auto at = [](Program& p, size_t i) { return p.begin() + static_cast<std::ptrdiff_t>(i); };
  for (const size_t arrival : arrivals) CHECK(is_found("gradient", [&](Program& p) { p.erase(at(p, arrival)); }));
  CHECK(is_found("is of an earlier gradient", [&](Program& p) { p.erase(at(p, factors.front())); }));
  CHECK(is_found("takes a factor of the last period for a gradient of this",
                 [&](Program& p) { std::rotate(at(p, updates.back()), at(p, updates.back() + 1), at(p, factors.front())); }));
  for (const size_t place : {updates.back(), factors.front() + 1})
    CHECK(is_found("a second time", [&](Program& p) { p.insert(at(p, place), Item(p[updates.front()])); }));
}

TEST_CASE("delayed updates are refused where they could not run beside the step, with what to do instead") {
  Refusals r(delayed(small_case(Family::kGpt)));
  r.c.layout.overlap = false;
  r.refused("delayed_update with overlap=false");
  r.c.layout.offload.optimizer = OffloadTo::kNvme;
  r.refused("delayed_update with offload.optimizer=nvme");
  r.c.layout.zero = 3;
  r.c.layout.offload.parameters = OffloadTo::kCpu;
  r.refused("delayed_update with offload.parameters=cpu");
  r.c.train.precision = Precision::kFp16;
  r.refused("delayed_update with precision=fp16");
  r.c.train.guard.nonfinite = GuardAction::kSkip;
  r.refused("delayed_update with guard");
  r.c.checkpoint.save_every = 2;
  r.refused("delayed_update with checkpoint");
  r.c.layout.offload.optimizer = OffloadTo::kNone;
  r.refused("offload.delayed_update without offload.optimizer");
}

}  // namespace shardlab::testing::of_delayed
