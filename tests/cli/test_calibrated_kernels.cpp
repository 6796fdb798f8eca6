// What the calibration of a processor measures, against the ops that plans are made of.
#include <map>
#include <set>
#include <string>

#include "cli/pairs.h"
#include "plan/program.h"
#include "simulator/interpreter/bench.h"
#include "simulator/interpreter/calibrate.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/peers.h"
#include "strategies/lower.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using namespace simulator;

/// A machine of which every kernel that a calibration measures was measured.
Machine calibrated_machine() {
  Calibration c;
  for (const CalibrationPlan& bench : calibration_plans({.cores = 2, .group_sizes = {2}, .rounds = 1}))
    for (const Segment& segment : bench.plan.segments)
      for (const Step& step : segment.steps)
        if (const Op* op = std::get_if<Op>(&step); op != nullptr && op->label != kPreparation)
          c.points.push_back({kernel_of(segment, *op), cost_shape_of(bench.plan, segment, *op), 1, 1e-6, 0, 1});
  return local_machine(c, 2, int64_t{1} << 34);
}

/// Kernels that flops and bytes price, and why.
const std::map<std::string, std::string>& not_measured() {
  static const std::map<std::string, std::string> kernels{
      {"attention_merge.F", "copies and additions, by bytes"},
      {"attention_merge.I", "copies and additions, by bytes"},
      {"strips.join", "copies, by bytes"},
      {"strips.sum", "additions, by bytes"},
      {"kernel.adjust_scale", "a few numbers"},
      {"kernel.any", "a few numbers"},
      {"kernel.clip_factor", "a few numbers"},
      {"kernel.count", "a few numbers"},
      {"kernel.fit_rows", "a few numbers"},
      {"kernel.fp8_remember", "a few numbers"},
      {"kernel.fp8_scale_e4m3", "a few numbers"},
      {"kernel.fp8_scale_e5m2", "a few numbers"},
      {"kernel.fp8_scales_e4m3", "a few numbers"},
      {"kernel.fp8_scales_e5m2", "a few numbers"},
      {"kernel.judge_spike", "a few numbers"},
      {"kernel.not", "a few numbers"},
      {"kernel.not_one", "a few numbers"},
      {"kernel.running_mean", "a few numbers"},
      {"kernel.start_scale", "a few numbers"},
      {"kernel.unscale_factor", "a few numbers"},
      {"kernel.unscale_norm", "a few numbers"},
      {"kernel.update_router_bias", "a few numbers"},
  };
  return kernels;
}

}  // namespace

TEST_CASE("every op of the choices that go together is priced by a measured kernel, or listed with the reason") {
  const Machine machine = calibrated_machine();
  const CalibratedCostModel model(machine);
  std::set<std::string> missing, listed;
  int ops = 0;
  uint64_t number = 0;
  for (const cli::LegalPair& pair : cli::legal_pairs()) {
    if (pair.config.transport == TransportKind::kOneGpu || number++ % dealt(1, 4) != 0) continue;
    const Result<Plan> plan = lower(pair.config);
    if (!plan.ok()) continue;
    for (const Segment& segment : plan->segments)
      for (const Step& step : segment.steps) {
        const Op* op = std::get_if<Op>(&step);
        if (op == nullptr) continue;
        Instruction instruction;
        instruction.segment = &segment;
        instruction.op = op;
        ++ops;
        if (model.measured(instruction) || uses_drive(segment, *op)) continue;
        const std::string kernel = kernel_of(*op);
        (not_measured().contains(kernel) ? listed : missing).insert(kernel);
      }
  }
  CHECK(missing == std::set<std::string>{});
  CHECK(ops > 10000);
  CHECK(listed.size() > 10);
  for (const auto& [kernel, why] : not_measured())
    if (thorough()) {
      INFO(kernel << ": " << why);
      CHECK(listed.contains(kernel));
    }
}

}  // namespace shardlab::testing
