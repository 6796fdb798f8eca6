// Exchanges of experts beside compute, timed exactly: where each of a few ops takes a second and all else takes no time, a step lasts as long
// as its pieces laid end to end by hand.
#include <string_view>

#include "simulator/interpreter/timeline.h"
#include "tests/namespaces.h"
#include "tests/segments/both.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

/// A second for attention's first product and for the experts', forward and backward for the input, and for each exchange of rows; `weight`
/// for the gradient of the experts' first weight, and `shared` for the first product of shared experts.
class ExchangeCosts final : public PlacedCostModel {
 public:
  ExchangeCosts(double weight, double shared) : weight_(weight), shared_(shared) {}

  Seconds compute(const Plan&, const Instruction& i, int) const override {
    const Phase phase = phase_of(i.op->work);
    const std::string_view label = i.op->label;
    if (label == "attn.qkv") return Seconds(phase == Phase::kW ? 0 : 1);
    if (label == "moe.up") return Seconds(phase == Phase::kW ? weight_ : 1);
    if (label == "moe.shared.up" && phase == Phase::kF) return Seconds(shared_);
    return Seconds(0);
  }
  Seconds communicate(const Plan&, const Instruction& i, int) const override {
    return Seconds(i.op->label.starts_with("moe.") && i.op->label != "moe.counts" ? 1 : 0);
  }
  Seconds dispatch() const override { return Seconds(0); }
  Seconds wake() const override { return Seconds(0); }

 private:
  double weight_, shared_;
};

Case mixture(ExpertOverlap overlap, int micro_batches, int layers) {
  Case c = gpt3_175b(1, micro_batches);
  c.model.family = Family::kLlama;
  c.model.hidden = 32, c.model.heads = c.model.kv_heads = 4, c.model.head_dim = 8, c.model.ffn = 64, c.model.vocab = 64;
  c.model.max_positions = c.train.seq_len = 16;
  c.model.layers = layers;
  c.model.experts = {.count = 4, .top_k = 2, .ffn = 16, .shared = 1};
  c.train.precision = Precision::kFp32;
  c.layout = {};
  c.layout.dp = c.layout.ep = 2;
  c.layout.expert_overlap = overlap;
  c.machine.nodes = 1;
  return c;
}

double step_of(ExpertOverlap overlap, int micro_batches, int layers, double weight, double shared) {
  const Case c = mixture(overlap, micro_batches, layers);
  REQUIRE(check(c).ok());
  const Lowered l = lowered(c);
  const ExchangeCosts costs(weight, shared);
  const double seconds = step_seconds(simulate(*l.plan, l.programs, c.machine, costs, {.max_individual_ranks = 2}));
  CHECK(SegmentTimeline(*l.plan, l.programs).step(c.machine, costs).seconds == seconds);
  return seconds;
}

}  // namespace

TEST_CASE("within a layer shared experts and gradients of weights hide exchanges") {
  using enum ExpertOverlap;
  for (const int m : {1, 2, 4})
    for (const int layers : {1, 3}) {
      // Attention, go, experts, return; and back.
      CHECK(step_of(kNone, m, layers, 0, 0) == 8.0 * m * layers);
      CHECK(step_of(kLayer, m, layers, 0, 0) == 8.0 * m * layers);
      CHECK(step_of(kNone, m, layers, 1, 0.5) == 9.5 * m * layers);
      // Shared experts while rows go, weights while gradients return.
      CHECK(step_of(kLayer, m, layers, 1, 0.5) == 8.0 * m * layers);
      CHECK(step_of(kLayer, m, layers, 1.25, 2) == 9.25 * m * layers);
    }
}

// A braid, one row a stream. Each piece and each exchange takes a second.
//
//   compute  F attention |              | F experts    | B experts    |              | B attention |
//   ep                   | F go         | B go         | F return     | B return     |
TEST_CASE("braided micro-batches hide half of the exchanges where compute takes as long") {
  using enum ExpertOverlap;
  for (const int m : {2, 3, 5}) {
    CHECK(step_of(kMicroBatches, m, 1, 0, 0) == 4 + 6.0 * (m - 1) + 4);
    CHECK(step_of(kNone, m, 1, 0, 0) == 8.0 * m);
  }
}

}  // namespace shardlab::testing
