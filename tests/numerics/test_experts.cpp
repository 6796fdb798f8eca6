// Mixtures of experts against the separately written single-rank reference, which knows no rows, no counts and no permutation.
//
// Canonical mode: losses and parameters after 5 steps have the reference's bits, under every layout that is not refused. Fast mode: the
// error against the fp64 reference is at most 1.5 times that of one rank. Plans with a wrong route, count or weight are refused.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "plan/verify.h"
#include "plan/wire.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/numerics/against_reference.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

Model mixture(const Experts& experts) {
  Model m;
  m.name = "mixture";
  m.family = Family::kLlama;
  m.layers = 2;
  m.hidden = 32;
  m.heads = 4;
  m.kv_heads = 2;
  m.head_dim = 8;
  m.ffn = 40;
  m.vocab = 64;
  m.max_positions = 24;
  m.init_deviation = 0.15f;
  m.experts = experts;
  return m;
}

constexpr Experts kSoftmax{.count = 8, .top_k = 2, .ffn = 20, .balance = 0.05f, .z_loss = 0.01f};
constexpr Experts kSigmoid{.count = 6, .top_k = 3, .ffn = 12, .sigmoid = true, .factor = 2.5f, .balance = 0.1f};
constexpr Experts kSwitch{.count = 8, .top_k = 1, .ffn = 20, .normalise = false};

Subject subject_of(const Experts& experts, Optimizer optimizer, float dropout = 0, float clip_norm = 0) {
  Train t;
  t.seq_len = 20;
  t.dropout = dropout;
  t.clip_norm = clip_norm;
  t.seed = 11;
  t.optimizer = optimizer;
  t.learning_rate.peak = optimizer == Optimizer::kSgd ? 1.0f : 0.01f;
  t.weight_decay = 0.1f;
  return {fmt::format("mixture of {} {}", experts.count, name_of(optimizer)), mixture(experts), t, 8};
}

struct Sizes {
  int dp = 1, ep = 1, pp = 1, zero = 0, accumulation = 1;
  Schedule schedule = Schedule::k1F1B;
};

Case case_of(const Subject& subject, const Sizes& sizes, bool canonical) {
  Case c;
  c.canonical = canonical;
  c.model = subject.model;
  c.train = subject.train;
  c.layout.dp = sizes.dp, c.layout.ep = sizes.ep, c.layout.pp = sizes.pp, c.layout.zero = sizes.zero;
  c.layout.overlap = sizes.accumulation % 2 == 0;
  if (sizes.pp > 1) c.layout.schedule = sizes.schedule;
  c.train.grad_accumulation = sizes.accumulation;
  c.train.micro_batch = subject.sequences / (sizes.accumulation * sizes.dp);
  c.train.grad_norm = true;
  c.name = fmt::format("{} dp{} ep{} pp{} zero{} ga{}", subject.name, sizes.dp, sizes.ep, sizes.pp, sizes.zero, sizes.accumulation);
  return c;
}

Result<Trained> train(const Case& config) { return train_case(config, RandomText(config.model.vocab), kSteps); }

void train_all(const Subject& subject, const std::vector<Case>& cases) {
  const auto expected = expect<float>(subject);
  for (const Case& config : cases) {
    INFO(config.name);
    const auto trained = train(config);
    const std::string difference = trained ? differences(config, expected, *trained) : to_string(trained.error());
    INFO(difference);
    CHECK(difference.empty());
  }
}

}  // namespace

TEST_CASE("experts, canonical: one rank, data parallel, ZeRO, stages and micro-batches train to the bits of the reference") {
  constexpr Sizes kSizes[] = {{},
                              {.accumulation = 2},
                              {.dp = 2, .accumulation = 2},
                              {.dp = 4, .zero = 1},
                              {.dp = 2, .zero = 2, .accumulation = 2},
                              {.dp = 2, .zero = 3, .accumulation = 2},
                              {.dp = 2, .pp = 2, .accumulation = 4}};
  for (const Subject& subject : {subject_of(kSoftmax, Optimizer::kSgd), subject_of(kSigmoid, Optimizer::kAdamW, 0.25f, 0.5f),
                                 subject_of(kSwitch, Optimizer::kSgd)}) {
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    cases.push_back(case_of(subject, {.pp = 2, .accumulation = 4, .schedule = Schedule::kZbH1}, true));
    train_all(subject, cases);
  }
}

TEST_CASE("experts, canonical: what is made again or waits elsewhere leaves the bits") {
  const Subject subject = subject_of(kSoftmax, Optimizer::kAdamW);
  std::vector<Case> cases;
  for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective}) {
    cases.push_back(case_of(subject, {.dp = 2, .accumulation = 2}, true));
    cases.back().layout.recompute = recompute;
  }
  cases[1].layout.recompute_options.modules = "mlp.act mlp.norm";
  cases.push_back(cases[0]);
  cases.back().layout.offload.activations = cases.back().layout.offload.optimizer = OffloadTo::kCpu;
  train_all(subject, cases);
}

TEST_CASE("expert parallel, canonical: shared among ranks, experts train to the bits of the reference") {
  constexpr Sizes kSizes[] = {{.dp = 2, .ep = 2},
                              {.dp = 4, .ep = 2},
                              {.dp = 2, .ep = 2, .accumulation = 2},
                              {.dp = 4, .ep = 2, .accumulation = 2},
                              {.dp = 4, .ep = 2, .zero = 1},
                              {.dp = 2, .ep = 2, .zero = 1},
                              {.dp = 4, .ep = 2, .zero = 2, .accumulation = 2},
                              {.dp = 2, .ep = 2, .pp = 2, .accumulation = 4}};
  for (const Subject& subject : {subject_of(kSoftmax, Optimizer::kSgd), subject_of(kSigmoid, Optimizer::kAdamW, 0.25f, 0.5f),
                                 subject_of(kSwitch, Optimizer::kAdamW)}) {
    std::vector<Case> cases;
    for (const Sizes& sizes : kSizes) cases.push_back(case_of(subject, sizes, true));
    if (subject.model.experts.count == 8) cases.push_back(case_of(subject, {.dp = 4, .ep = 4, .zero = 2, .accumulation = 2}, true));
    cases.push_back(cases[0]);
    cases.back().layout.recompute = Recompute::kFull;
    cases.push_back(cases[1]);
    cases.back().layout.offload.activations = OffloadTo::kCpu;
    cases.push_back(cases[4]);
    cases.back().layout.bucket_bytes = 8192;
    train_all(subject, cases);
  }
}

TEST_CASE("experts, fast: no layout is further from fp64 than 1.5 times one rank") {
  const Subject subject = subject_of(kSoftmax, Optimizer::kSgd);
  const auto expected = expect<double>(subject);
  const auto one_rank = train(case_of(subject, {}, false));
  REQUIRE(one_rank.ok());
  const double bound = 1.5 * error_of(expected, *one_rank) + 1e-6;
  for (const Sizes& sizes :
       {Sizes{.dp = 2, .accumulation = 2}, {.dp = 4, .zero = 2}, {.dp = 4, .ep = 2, .zero = 1, .accumulation = 2}}) {
    const auto trained = train(case_of(subject, sizes, false));
    REQUIRE(trained.ok());
    CHECK(error_of(expected, *trained) <= bound);
  }
}

namespace {

/// Changes the ops of that label and phase; false where there is none.
bool change(Plan& plan, std::string_view segment, std::string_view label, Phase phase,
            const std::function<void(Segment&, Op&)>& with) {
  bool any = false;
  for (Segment& s : plan.segments)
    for (Step& step : s.steps)
      if (Op* op = std::get_if<Op>(&step);
          op != nullptr && s.name == segment && op->label == label && phase_of(op->work) == phase) {
        with(s, *op);
        any = true;
      }
  return any;
}

SlotId slot(const Segment& s, std::string_view name) {
  for (size_t i = 0; i < s.slots.size(); ++i)
    if (s.slots[i].name == name) return SlotId(static_cast<int32_t>(i));
  SHARDLAB_CHECK(false, "{} has no slot {}", s.name, name);
}

std::string verdict(const Plan& plan) {
  const auto verdict = verify(plan);
  return verdict.ok() ? "accepted" : to_string(verdict.error());
}

}  // namespace

TEST_CASE("experts: a wrong route, count, weight or gradient is refused, and says what is wrong") {
  const auto lowered = lower(case_of(subject_of(kSoftmax, Optimizer::kSgd), {.dp = 2, .accumulation = 2}, true));
  REQUIRE(lowered.ok());
  REQUIRE(verdict(*lowered) == "accepted");
  struct Damage {
    std::string_view segment, label;
    Phase phase;
    std::function<void(Segment&, Op&)> with;
    std::string_view says;
  };
  const std::vector<Damage> damages{
      {"layer.F", "moe.combine", Phase::kF, [](Segment& s, Op& op) { op.reads[0] = slot(s, "rows.in"); }, "which no expert made"},
      {"layer.B", "moe.combine", Phase::kI, [](Segment& s, Op& op) { op.reads[1] = slot(s, "rows.in"); },
       "what the forward op of this label read"},
      {"layer.B", "moe.down", Phase::kW, [](Segment& s, Op& op) { op.reads[1] = slot(s, "d.rows.in"); }, ""},
      {"layer.B", "moe.up", Phase::kW, [](Segment& s, Op& op) { op.reads[1] = op.reads[0]; }, ""},
      {"layer.F", "moe.route", Phase::kF, [](Segment&, Op& op) { std::get<Route>(op.work).normalise = false; }, "normalise"},
      {"layer.B", "moe.route", Phase::kI, [](Segment&, Op& op) { std::get<Route>(op.work).tokens *= 2; }, "tokens"},
      {"layer.F", "moe.dispatch", Phase::kF, [](Segment&, Op& op) { std::get<Dispatch>(op.work).experts = 4; }, "experts"},
      {"layer.B", "moe.norm.y", Phase::kNone, [](Segment&, Op& op) { op.reads[1] = op.reads[0]; }, "gradient"},
      {"layer.B", "moe.down", Phase::kI, [](Segment& s, Op& op) { op.reads[0] = slot(s, "rows.in"); }, "as a gradient"},
      {"layer.F", "moe.up", Phase::kF, [](Segment&, Op& op) { std::get<GroupedLinear>(op.work).sources = 3; }, "sources=3"},
  };
  for (const Damage& damage : damages) {
    Plan plan = *lowered;
    INFO(damage.segment << " " << damage.label << " " << damage.says);
    REQUIRE(change(plan, damage.segment, damage.label, damage.phase, damage.with));
    const std::string said = verdict(plan);
    INFO(said);
    CHECK(said != "accepted");
    CHECK(said.find(damage.says) != std::string::npos);
  }
}

}  // namespace shardlab::testing
