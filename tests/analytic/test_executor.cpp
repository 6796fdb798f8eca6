// Under the profile "shardlab" the estimate's memory and wire bytes are those of the closed forms, and so of the plans, to the
// byte.
#include <algorithm>
#include <vector>

#include "tests/analytic/expected.h"
#include "tests/analytic/studies.h"
#include "tests/laws/grid.h"
#include "tests/test.h"

namespace shardlab::simulator::analytic {
namespace {

using testing::expected_of;

TEST_CASE("memory and wire bytes of every legal case equal the closed forms") {
  int64_t stages = 0;
  for (Case c : shardlab::testing::legal_cases()) {
    const auto expected = expected_of(c);
    c.machine = testing::machine(16);
    const auto prepared = prepare(c);
    const auto point = point_of(c);
    INFO(c.name);
    REQUIRE(prepared.ok());
    REQUIRE(point.ok());
    Estimator estimator(*prepared);
    const Estimate e = estimator(*point);
    REQUIRE(e.legal());
    REQUIRE(e.wire_total() == static_cast<double>(expected.wire_total));
    REQUIRE(e.wire[static_cast<size_t>(WireUse::kTensor)] == static_cast<double>(expected.tensor_wire));
    REQUIRE(e.wire[static_cast<size_t>(WireUse::kGradients)] == static_cast<double>(expected.gradient_wire));
    int64_t worst = 0;
    for (size_t i = 0; i < expected.stages.size(); ++i, ++stages) {
      const MemoryBytes m = estimator.stage_memory(*point, static_cast<int32_t>(i));
      REQUIRE(m.live() == expected.stages[i].peak);
      REQUIRE(m[MemoryPart::kParameters] == expected.stages[i].parameters);
      REQUIRE(m[MemoryPart::kGradients] == expected.stages[i].gradients);
      REQUIRE(m[MemoryPart::kMoments] == expected.stages[i].moments);
      REQUIRE(m[MemoryPart::kActivations] == expected.stages[i].activations);
      worst = std::max(worst, m.live());
    }
    REQUIRE(e.memory.live() == worst);
    REQUIRE(e.memory.reserved() == worst);
  }
  CHECK(stages == 23256);
}

TEST_CASE("fp8: memory and wire bytes equal the closed forms under every way of scaling") {
  const std::vector<Case> grid = shardlab::testing::legal_cases();
  int compared = 0;
  for (const char* scaling : {"current", "delayed", "block"})
    for (size_t i = 0; i < grid.size(); i += 97) {
      Case c = grid[i];
      c.train.precision = "fp8";
      c.train.fp8_scaling = scaling;
      if (!check(c).ok()) continue;
      const auto expected = expected_of(c);
      c.machine = testing::machine(16);
      const auto prepared = prepare(c);
      const auto point = point_of(c);
      INFO(scaling << " " << c.name);
      REQUIRE(prepared.ok());
      REQUIRE(point.ok());
      Estimator estimator(*prepared);
      const Estimate e = estimator(*point);
      REQUIRE(e.legal());
      REQUIRE(estimator.exact(*point));
      REQUIRE(e.wire_total() == static_cast<double>(expected.wire_total));
      for (size_t s = 0; s < expected.stages.size(); ++s) {
        const MemoryBytes m = estimator.stage_memory(*point, static_cast<int32_t>(s));
        REQUIRE(m.live() == expected.stages[s].peak);
        REQUIRE(m[MemoryPart::kActivations] == expected.stages[s].activations);
      }
      ++compared;
    }
  CHECK(compared > 100);
}

TEST_CASE("what a case says arrives in the point") {
  Case c;
  c.model = {.name = "tiny", .family = Family::kLlama, .layers = 8, .hidden = 64, .heads = 8, .kv_heads = 4, .head_dim = 8};
  c.model.ffn = 128, c.model.vocab = 64;
  c.layout.dp = 2, c.layout.tp = 4, c.layout.pp = 2, c.layout.zero = 1;
  c.layout.schedule = shardlab::Schedule::k1F1B;
  c.layout.recompute = shardlab::Recompute::kFull;
  c.layout.overlap = false;
  c.train.seq_len = 32, c.train.micro_batch = 3, c.train.grad_accumulation = 5, c.train.precision = "bf16";
  const auto p = point_of(c);
  REQUIRE(p.ok());
  CHECK(p->world_size() == 16);
  CHECK(p->schedule == Schedule::k1F1B);
  CHECK(p->recompute.full());
  CHECK(p->precision == Precision::kBf16);
  CHECK(p->overlap == 0);
  CHECK(p->tokens_per_step() == 2 * 3 * 5 * 32);
  c.train.precision = "fp7";
  CHECK(!point_of(c).ok());
  c.train.precision = "bf16", c.train.micro_batch = int64_t{1} << 40;
  CHECK(!point_of(c).ok());
  c.profile = "no-such-framework";
  CHECK(!prepare(c).ok());
}

}  // namespace
}  // namespace shardlab::simulator::analytic
