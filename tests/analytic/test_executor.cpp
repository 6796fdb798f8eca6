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
