#include <cmath>

#include "reports/columns.h"
#include "reports/waterfall.h"
#include "tests/namespaces.h"
#include "tests/reports/sample.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

double sum_of(const std::vector<Bar>& bars) {
  double sum = 0;
  for (const Bar& bar : bars) sum += bar.seconds;
  return sum;
}

double seconds_of(const std::vector<Bar>& bars, std::string_view name) {
  for (const Bar& bar : bars)
    if (bar.name == name) return bar.seconds;
  return 0;
}

}  // namespace

TEST_CASE("the bars of every step add up to it, whether its parts were told or not") {
  for (CaseOutcome& o : sweep_outcomes()) {
    for (const bool measured : {false, true}) {
      const double step = measured ? (o.measured ? o.measured->step_s : 0) : o.predicted ? o.predicted->step_s : 0;
      CAPTURE(o.config.name, measured);
      CHECK(std::abs(sum_of(waterfall(o, measured)) - step) <= 1e-12 * step);
    }
  }
}

TEST_CASE("compute is the ideal and what it takes beyond, other parts are those of the step") {
  CaseOutcome o = small_outcome();
  o.config.machine.device.peak_flops["fp32"] = 2.5e12;
  StepParts& parts = o.predicted->parts;
  parts.compute_s = 0.05, parts.recompute_s = 0.01, parts.tensor_s = 0.02, parts.bubble_s = 0.01;
  const std::vector<Bar> bars = waterfall(o, false);
  const double ideal = *mfu(o, o.predicted->step_s) * o.predicted->step_s;
  REQUIRE(ideal < 0.05);
  CHECK(seconds_of(bars, "ideal") == ideal);
  CHECK(seconds_of(bars, "kernels") == 0.05 - ideal);
  CHECK(seconds_of(bars, "recompute") == 0.01);
  CHECK(seconds_of(bars, "tensor") == 0.02);
  CHECK(seconds_of(bars, "bubble") == 0.01);
  CHECK(seconds_of(bars, "compute") == 0);
  CHECK(std::abs(sum_of(bars) - 0.09) < 1e-15);
  // A machine without a peak has no ideal.
  o.config.machine.device.peak_flops.clear();
  CHECK(seconds_of(waterfall(o, false), "ideal") == 0);
  CHECK(seconds_of(waterfall(o, false), "compute") == 0.05);
}
