// The timeline of a lowered pipeline is its schedule: where only one op of each layer and phase takes any time, a step ends when the
// schedule played by itself does, to the bit, and the bubble is what the papers say. No message, buffer or stream holds a stage up.
#include <fmt/format.h>

#include <algorithm>

#include "plan/pipeline_case.h"
#include "simulator/interpreter/timeline.h"
#include "tests/namespaces.h"
#include "tests/schedules.h"
#include "tests/segments/both.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

/// Whole seconds for the product that goes up in each layer, forward, backward for its input and for its weights; nothing else takes
/// any time.
class PhaseCosts final : public PlacedCostModel {
 public:
  PhaseCosts(double forward, double input, double weight) : seconds_{forward, input, weight} {}

  Seconds compute(const Plan&, const Instruction& i, int) const override {
    if (i.op->label != "mlp.up" || !std::holds_alternative<Linear>(i.op->work)) return Seconds(0);
    switch (phase_of(i.op->work)) {
      case Phase::kF: return Seconds(seconds_[0]);
      case Phase::kI: return Seconds(seconds_[1]);
      case Phase::kW: return Seconds(seconds_[2]);
      case Phase::kNone: break;
    }
    return Seconds(0);
  }
  Seconds communicate(const Plan&, const Instruction&, int) const override { return Seconds(0); }
  Seconds dispatch() const override { return Seconds(0); }
  Seconds wake() const override { return Seconds(0); }

 private:
  double seconds_[3];
};

Case piped(Schedule schedule, int stages, int virtual_stages, int micro_batches) {
  Case c = gpt3_175b(stages, micro_batches);
  c.layout.tp = 1;
  c.layout.schedule = schedule;
  c.layout.vpp = is_looped(schedule) ? virtual_stages : 1;
  c.layout.overlap = true;
  c.model.hidden = 32, c.model.heads = c.model.kv_heads = 4, c.model.head_dim = 8, c.model.ffn = 64, c.model.vocab = 64;
  c.model.max_positions = c.train.seq_len = 16;
  c.model.layers = parts_of(c);
  c.machine.nodes = (stages + 7) / 8;
  return c;
}

TEST_CASE("a step takes as long as its schedule played by itself, op by op and by segments") {
  int cases = 0;
  for (const Schedule schedule : pipeline_schedules())
    for (const int p : {2, 3, 4, 8})
      for (const int m : {1, p, 2 * p, 4 * p - 1})
        for (const int v : {2, 4}) {
          if (v > 2 && (!is_looped(schedule) || p > 4)) continue;
          const Case c = piped(schedule, p, v, m);
          if (!check(c).ok()) continue;  // dualpipe has an even number of stages and a micro-batch for each direction
          const Lowered l = lowered(c);
          for (const auto& [forward, input, weight] : {std::array{1.0, 1.0, 1.0}, {2.0, 2.0, 1.0}, {1.0, 2.0, 1.0}}) {
            const PhaseCosts costs(forward, input, weight);
            const PipelineSchedule s = schedule_of(c);
            const double expected = play(s, SlotCosts::uniform(s.parts, forward, input, weight))->end;
            const double found = step_seconds(simulate(*l.plan, l.programs, c.machine, costs, {.max_individual_ranks = 1}));
            const double by_segments = SegmentTimeline(*l.plan, l.programs).step(c.machine, costs).seconds;
            INFO(name_of(schedule) << " p " << p << " v " << c.layout.vpp << " m " << m << " F " << forward << " I " << input
                                   << " W " << weight);
            CHECK(found == expected);
            CHECK(by_segments == expected);
            ++cases;
          }
        }
  fmt::print("{} steps last as long as their schedules\n", cases);
}

TEST_CASE("with post-validation a stage begins a step where its last one ended, and steps in which stages meet do not") {
  for (const Schedule schedule : {Schedule::kZbH2, Schedule::kZbV})
    for (const int p : {2, 3, 4, 8})
      for (const int k : {2, 3, 5}) {
        const int m = 2 * p;
        Case c = piped(schedule, p, 1, m);
        c.train.clip_norm = 1;
        const Lowered meeting = lowered(c);
        c.train.post_validation = k;
        REQUIRE(check(c).ok());
        const Lowered later = lowered(c);
        const PhaseCosts costs(1, 1, 1);
        // F = I = W = 1 of a part. A stage of v parts is busy for 3 m v in one piece, and the last begins p - 1 after the first.
        const double busy = 3.0 * m * (schedule == Schedule::kZbV ? 2 : 1), late = p - 1;
        INFO(name_of(schedule) << " p " << p << " period " << k);
        const auto op_by_op = [&](const Lowered& l) {
          return step_seconds(simulate(*l.plan, l.programs, c.machine, costs, {.max_individual_ranks = 1}));
        };
        const auto by_segments = [&](const Lowered& l) {
          return SegmentTimeline(*l.plan, l.programs).step(c.machine, costs).seconds;
        };
        CHECK(op_by_op(meeting) == busy + late);
        CHECK(op_by_op(later) == k * busy + late);  // (k - 1)(p - 1) less than k steps
        CHECK(by_segments(meeting) == busy + late);
        CHECK(by_segments(later) == k * busy + late);
      }
}

}  // namespace
}  // namespace shardlab::testing
