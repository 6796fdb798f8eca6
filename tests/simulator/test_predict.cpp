// The figures of a prediction, against the plan's own folds and a timeline worked out by hand.

#include "plan/memory.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/predict.h"
#include "simulator/interpreter/timeline.h"
#include "tests/namespaces.h"
#include "tests/simulator/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using namespace testing;

constexpr const char* kPredictedPlan = R"(shardlab plan 1
name predicted
mesh dp=2
streams compute comm
comm grads axes dp

segment s
  bound %x activation f32[1000]
  bound %g gradient f32[1000] dp:P
  local %t temporary f32[10]
  local %sum gradient f32[1000] view %g

  copy a (%x) -> (%g)
  all_reduce reduce (%g) -> (%sum) comm=grads @comm
  alloc %t
  fill b () -> (%t)
  free %t
  copy c (%sum) -> (%x)

role 0
  %x activation f32[1000] persistent
  %g gradient f32[1000] dp:P
  alloc %g
  call s (x=%x, g=%g)
  free %g
)";

class Extrapolating final : public PlacedCostModel {
 public:
  explicit Extrapolating(std::string label) : label_(std::move(label)) {}
  Seconds compute(const Plan&, const Instruction&, int) const override { return Seconds(1); }
  Seconds communicate(const Plan&, const Instruction&, int) const override { return Seconds(3); }
  Seconds dispatch() const override { return Seconds(0); }
  Seconds wake() const override { return Seconds(0); }
  bool extrapolates(const Plan&, const Instruction& i) const override { return i.op->label == label_; }

 private:
  std::string label_;
};

}  // namespace

TEST_CASE("a prediction states time, memory and wire bytes") {
  const Expanded e = expanded(kPredictedPlan);
  Case config;
  config.machine = own_devices();
  config.machine.calibration = std::make_shared<const Calibration>(Calibration{.id = "today"});
  const Predicted p = predict(config, *e.plan, e.programs, 12345, Extrapolating(""));
  CHECK(p.figures.step_s == Approx(5));  // a, then reduce beside b, then c
  CHECK(p.figures.compute_s == Approx(3));
  CHECK(p.figures.exposed_comm_s == Approx(2));
  CHECK(p.figures.bubble_fraction == 0);
  CHECK(p.figures.peak_bytes == 4032 + 4032 + 64);
  CHECK(p.figures.memory.total() == p.figures.peak_bytes);
  CHECK(p.figures.arena_bytes == 12345);
  CHECK(p.figures.wire_bytes == 2 * 4000);  // two ranks, 2 n (g - 1) / g each
  CHECK_FALSE(p.figures.extrapolated);
  CHECK(p.figures.calibration_id == "today");
  CHECK(p.trace.producer == "simulator");
}

TEST_CASE("of a plan of several steps a prediction states one: the mean over its period") {
  std::string text = kPredictedPlan;
  text.insert(text.find("streams"), "period 4\n");
  const Expanded e = expanded(text);
  Case config;
  config.machine = own_devices();
  const Predicted p = predict(config, *e.plan, e.programs, 12345, Extrapolating(""));
  CHECK(p.figures.step_s == Approx(5.0 / 4));
  CHECK(p.figures.compute_s == Approx(3.0 / 4));
  CHECK(p.figures.exposed_comm_s == Approx(2.0 / 4));
  CHECK(p.figures.idle.idle_s == Approx(0).margin(1e-12));
  CHECK(p.figures.peak_bytes == 4032 + 4032 + 64);
  CHECK(p.figures.wire_bytes == 2 * 4000 / 4);
  CHECK(step_seconds(p.trace) == Approx(5));  // of the period
}

TEST_CASE("a prediction says when it extrapolates") {
  const Expanded e = expanded(kPredictedPlan);
  Case config;
  config.machine = own_devices();
  CHECK(predict(config, *e.plan, e.programs, 0, Extrapolating("b")).figures.extrapolated);
  config.threads_per_rank = 2;
  CHECK(predict(config, *e.plan, e.programs, 0, Extrapolating("")).figures.extrapolated);
  config.threads_per_rank = 1;
  CHECK_FALSE(predict(config, *e.plan, e.programs, 0, Extrapolating("")).figures.extrapolated);
  config.canonical = true;  // its matmul was never calibrated
  CHECK(predict(config, *e.plan, e.programs, 0, Extrapolating("")).figures.extrapolated);
}

}  // namespace shardlab::testing
