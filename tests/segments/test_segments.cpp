// The timeline on segment level where it must equal the one op by op: to rounding.
#include <fmt/format.h>

#include "tests/namespaces.h"
#include "tests/segments/both.h"
#include "tests/simulator/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using namespace testing;

constexpr double kRounding = 1e-11;

void require_equal(const Plan& plan, const std::vector<Program>& programs, const Machine& machine, const PlacedCostModel& costs) {
  SegmentTimeline timeline(plan, programs);
  require_same(op_by_op(plan, programs, machine, costs), timeline.step(machine, costs), kRounding);
}

/// Work on the control stream, and a reduction beside it.
constexpr const char* kBesideReduction = R"(shardlab plan 1
name overlap
mesh dp=2
streams compute comm
comm grads axes dp

segment s
  bound %x activation f32[16]
  bound %g gradient f32[16] dp:P
  bound %z activation f32[16]
  local %sum gradient f32[16] view %g

  copy a (%x) -> (%g)
  all_reduce reduce (%g) -> (%sum) comm=grads @comm
  copy b (%x) -> (%z)
  copy c (%z) -> (%x)
  copy d (%sum) -> (%z)

role 0
  %x activation f32[16] persistent
  %g gradient f32[16] dp:P persistent
  %z activation f32[16] persistent
  call s (x=%x, g=%g, z=%z)
)";

}  // namespace

TEST_CASE("pipelines by segments are pipelines op by op") {
  FixedCostModel costs;
  costs.seconds = {{"F", 1}, {"B", 2}};
  for (const double message : {0.0, 0.25, 1.5})
    for (const double launch : {0.0, 0.125, 3.0})
      for (const double wake : {0.0, 0.0625})
        for (const bool one_f_one_b : {true, false})
          for (const int p : {1, 2, 3, 4})
            for (const int m : {1, 2, 4, 7}) {
              INFO("p " << p << " m " << m << " 1f1b " << one_f_one_b << " message " << message << " launch " << launch << " wake "
                        << wake);
              costs.otherwise = message, costs.dispatch_s = launch, costs.wake_s = wake;
              const Expanded e = pipeline(p, m, one_f_one_b);
              require_equal(*e.plan, e.programs, own_devices(), costs);
            }
}

TEST_CASE("the bubble of 1F1B is (p - 1) / (m + p - 1), and its exposed communication is that of its messages") {
  FixedCostModel costs;
  costs.otherwise = 0;
  costs.seconds = {{"F", 1}, {"B", 1}};
  const Expanded e = pipeline(4, 7, true);
  SegmentTimeline timeline(*e.plan, e.programs);
  const SegmentStep step = timeline.step(own_devices(), costs);
  CHECK(step.seconds == Approx(20));
  CHECK(step.stage == 0);
  CHECK(step.breakdown.compute_s == Approx(14));
  CHECK(step.breakdown.bubble_fraction == Approx(0.3));
  REQUIRE(step.exposed_by_comm_s.size() == e.plan->comms.size());
}

TEST_CASE("a reduction beside a stretch, at every ratio of their lengths") {
  const Expanded e = expanded(kBesideReduction);
  FixedCostModel costs;
  for (const double reduce : {0.0, 0.25, 1.0, 2.0, 2.5, 7.0})
    for (const double launch : {0.0, 0.5, 1.5})
      for (const double wake : {0.0, 0.125}) {
        INFO("reduce " << reduce << " launch " << launch << " wake " << wake);
        costs.seconds = {{"reduce", reduce}};
        costs.dispatch_s = launch, costs.wake_s = wake;
        SegmentTimeline timeline(*e.plan, e.programs);
        const OpByOp ops = op_by_op(*e.plan, e.programs, own_devices(), costs);
        const SegmentStep step = timeline.step(own_devices(), costs);
        CHECK(step.seconds == Approx(ops.seconds).epsilon(kRounding));
        CHECK(step.breakdown.compute_s == Approx(ops.breakdown.compute_s).epsilon(kRounding));
        // Where within a stretch its host is late is not told.
        if (launch < 1) require_same(ops, step, kRounding);
      }
}

TEST_CASE("what one device shares is shared as op by op") {
  // Tensor parallel groups on their own nodes; reductions of gradients use the links and the memory of the device that computes.
  Case c = gpt3_175b(1, 2);
  c.model.layers = 3, c.model.hidden = 1024, c.model.heads = c.model.kv_heads = 16, c.model.head_dim = 64, c.model.ffn = 4096;
  c.layout.dp = 4;
  c.machine.nodes = 4;
  for (const int zero : {0, 1, 2, 3})
    for (const int tp : {1, 2, 8})
      for (const bool overlap : {true, false}) {
        INFO("zero " << zero << " tp " << tp << " overlap " << overlap);
        c.layout.zero = zero, c.layout.tp = tp, c.layout.overlap = overlap;
        c.layout.bucket_bytes = zero == 3 ? 0 : 4 << 20;
        c.machine.nodes = c.layout.world_size() > 8 ? c.layout.world_size() / 8 : 1;
        const Lowered l = lowered(c);
        SegmentTimeline timeline(*l.plan, l.programs);
        const DatasheetCostModel costs(c.machine, Precision::kBf16);
        const OpByOp ops = op_by_op(*l.plan, l.programs, c.machine, costs);
        const SegmentStep step = timeline.step(c.machine, costs);
        CHECK(step.seconds == Approx(ops.seconds).epsilon(2e-5));
        CHECK(step.breakdown.compute_s == Approx(ops.breakdown.compute_s).epsilon(1e-2));
      }
}

TEST_CASE("prices may change under a plan that stays, and nothing of the last step is left") {
  const Case c = gpt3_175b(4, 8);
  const Lowered l = lowered(c);
  SegmentTimeline kept(*l.plan, l.programs);
  Machine slower = c.machine;
  slower.inter_bytes_per_s /= 16;
  slower.device.memory_bytes_per_s /= 2;
  const DatasheetCostModel fast(c.machine, Precision::kBf16), slow(slower, Precision::kBf16);
  const SegmentStep first = kept.step(c.machine, fast), other = kept.step(slower, slow), again = kept.step(c.machine, fast);
  CHECK(first.seconds == again.seconds);
  CHECK(first.breakdown.exposed_comm_s == again.breakdown.exposed_comm_s);
  CHECK(first.exposed_by_comm_s == again.exposed_by_comm_s);
  CHECK(other.seconds > 1.2 * first.seconds);
  CHECK(other.seconds == Approx(op_by_op(*l.plan, l.programs, slower, slow).seconds).epsilon(1e-4));
}

TEST_CASE("175B on 8 stages with 64 micro-batches") {
  const Case c = gpt3_175b(8, 64);
  const Lowered l = lowered(c);
  const DatasheetCostModel costs(c.machine, Precision::kFp32);
  SegmentTimeline timeline(*l.plan, l.programs);
  const SegmentStep step = timeline.step(c.machine, costs);
  const OpByOp ops = op_by_op(*l.plan, l.programs, c.machine, costs);
  CHECK(step.seconds == Approx(ops.seconds).epsilon(1e-6));
  CHECK(step.breakdown.compute_s == Approx(ops.breakdown.compute_s).epsilon(1e-6));
  CHECK(step.breakdown.exposed_comm_s == Approx(ops.breakdown.exposed_comm_s).epsilon(1e-6));
  CHECK(step.breakdown.bubble_fraction == Approx(ops.breakdown.bubble_fraction).epsilon(1e-5));
  CHECK(timeline.events() < 5'000);
}

}  // namespace shardlab::testing
