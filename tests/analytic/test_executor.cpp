// Points of shardlab's own executor, and the cases that they stand for.
#include <vector>

#include "tests/analytic/studies.h"
#include "tests/laws/grid.h"
#include "tests/test.h"

namespace shardlab::simulator::analytic {
namespace {

TEST_CASE("the case that a point stands for is the case that the point was made of") {
  size_t number = 0, same = 0;
  for (Case c : shardlab::testing::legal_cases()) {
    if (number++ % 7 != 0) continue;
    c.machine = testing::machine(16);
    if (c.layout.zero == 3 || c.layout.dp == 1) c.layout.bucket_bytes = 0;
    c.train.global_batch_tokens = c.sequences_per_step() * c.train.seq_len;
    if (!check(c).ok()) continue;
    const auto prepared = prepare(c);
    const auto point = point_of(c);
    INFO(c.name);
    REQUIRE(prepared.ok());
    REQUIRE(point.ok());
    Estimator estimator(*prepared);
    REQUIRE(estimator(*point).legal());
    const Case* executed = estimator.executed(*point);
    REQUIRE(executed != nullptr);
    Case expected = c;
    if (c.layout.zero != 3) expected.layout.fsdp = {};
    REQUIRE(executed->layout == expected.layout);
    REQUIRE(executed->train == expected.train);
    REQUIRE(executed->canonical == c.canonical);
    REQUIRE(parameter_count(executed->model) == parameter_count(c.model));
    ++same;
  }
  CHECK(same > 1000);
}

TEST_CASE("slices of experts and whole experts are two points, and each is the case that it was made of") {
  Case c;
  c.model = {.name = "tiny", .family = Family::kLlama, .layers = 2, .hidden = 64, .heads = 8, .kv_heads = 4, .head_dim = 8};
  c.model.ffn = 128, c.model.vocab = 64;
  c.model.experts = {.count = 8, .top_k = 2, .ffn = 64};
  c.machine = testing::machine(8);
  c.layout.dp = 2, c.layout.tp = 4, c.layout.sequence_parallel = true;
  c.train.seq_len = 32, c.train.micro_batch = 1, c.train.grad_accumulation = 2;
  c.train.global_batch_tokens = c.sequences_per_step() * c.train.seq_len;
  Case whole = c;
  c.layout.ep = 2, whole.layout.ep = 8, whole.layout.expert_tp = 1;
  std::vector<double> wire;
  for (const Case& said : {c, whole}) {
    const auto prepared = prepare(said);
    const auto point = point_of(said);
    REQUIRE(prepared.ok());
    REQUIRE(point.ok());
    CHECK(point->expert_tp == (said.layout.folds_experts() ? said.layout.expert_tp : 4));
    CHECK(point->cuts_experts_apart() == said.layout.folds_experts());
    Estimator estimator(*prepared);
    const Estimate e = estimator(*point);
    REQUIRE(e.legal());
    REQUIRE(estimator.executed(*point) != nullptr);
    CHECK(estimator.executed(*point)->layout == said.layout);
    wire.push_back(e.wire[static_cast<size_t>(WireUse::kExpert)]);
  }
  CHECK(wire[1] < wire[0]);
  // A model without experts has none to cut.
  c.model.experts = {}, c.layout.ep = 1;
  CHECK(point_of(c)->expert_tp == 1);
  c.layout.expert_tp = 4;
  Estimator estimator(*prepare(c));
  CHECK(estimator(*point_of(c)).refusal == Refusal::kExperts);
}

TEST_CASE("slices of experts take the work of 1/tp of each row, with tokens cut over tp and without") {
  Case c;
  c.model = {.name = "wide", .family = Family::kLlama, .layers = 2, .hidden = 4096, .heads = 32, .kv_heads = 8, .head_dim = 128};
  c.model.ffn = 14336, c.model.vocab = 32000;
  c.model.experts = {.count = 8, .top_k = 2, .ffn = 14336};
  c.machine = testing::machine(8);
  c.layout.dp = 2, c.layout.tp = 4, c.layout.ep = 2;
  c.train.seq_len = 4096, c.train.micro_batch = 1, c.train.grad_accumulation = 1, c.train.precision = Precision::kBf16;
  c.train.global_batch_tokens = c.sequences_per_step() * c.train.seq_len;
  const auto estimate = [](const Case& said) {
    Estimator estimator(*prepare(said));
    const Estimate e = estimator(*point_of(said));
    REQUIRE(e.legal());
    return e;
  };
  Case strips = c, whole = c;
  strips.layout.sequence_parallel = whole.layout.sequence_parallel = true;
  whole.layout.ep = 8, whole.layout.expert_tp = 1;
  // Products are of as many flops; what is left to differ is their shapes, and norms and routers of all tokens.
  const double forward = estimate(c).part(TimePart::kForward);
  CHECK(estimate(strips).part(TimePart::kForward) == Approx(forward).epsilon(0.25));
  CHECK(estimate(whole).part(TimePart::kForward) == Approx(forward).epsilon(0.25));
  // Slices gather tokens before the experts and scatter behind them, as attention does around its products; whole experts do not.
  const double tensor = estimate(strips).part(TimePart::kTensorParallel);
  CHECK(estimate(whole).part(TimePart::kTensorParallel) < 0.8 * tensor);
  CHECK(estimate(whole).part(TimePart::kExpertParallel) < estimate(strips).part(TimePart::kExpertParallel));
}

TEST_CASE("what a case says arrives in the point") {
  Case c;
  c.model = {.name = "tiny", .family = Family::kLlama, .layers = 8, .hidden = 64, .heads = 8, .kv_heads = 4, .head_dim = 8};
  c.model.ffn = 128, c.model.vocab = 64;
  c.layout.dp = 2, c.layout.tp = 4, c.layout.pp = 2, c.layout.zero = 1;
  c.layout.schedule = shardlab::Schedule::k1F1B;
  c.layout.recompute = shardlab::Recompute::kFull;
  c.layout.overlap = false;
  c.train.seq_len = 32, c.train.micro_batch = 3, c.train.grad_accumulation = 5, c.train.precision = Precision::kBf16;
  const auto p = point_of(c);
  REQUIRE(p.ok());
  CHECK(p->world_size() == 16);
  CHECK(p->schedule == Schedule::k1F1B);
  CHECK(p->recompute.full());
  CHECK(p->precision == Precision::kBf16);
  CHECK(p->overlap == 0);
  CHECK(p->tokens_per_step() == 2 * 3 * 5 * 32);
  c.data.text = "somewhere";
  CHECK(point_of(c).ok());
  c.data.packed = true;  // attention within documents has no closed form
  CHECK(!point_of(c).ok());
  c.data.packed = false;
  c.train.micro_batch = int64_t{1} << 40;
  CHECK(!point_of(c).ok());
  c.profile = "no-such-framework";
  CHECK(!prepare(c).ok());
}

}  // namespace
}  // namespace shardlab::simulator::analytic
