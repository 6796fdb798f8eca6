// Calibration of a GPU without one: its plans are simulated under known costs, the fit must find these again, and the machine file
// says whose they are.
#include <set>

#include "plan/base/attention_calls.h"
#include "simulator/interpreter/calibrate.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/machine_yaml.h"
#include "simulator/interpreter/timeline.h"
#include "tests/namespaces.h"
#include "tests/simulator/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using namespace testing;

/// Every extent of the shape costs a nanosecond, an op a microsecond.
class MadeUpDevice final : public PlacedCostModel {
 public:
  Seconds compute(const Plan& plan, const Instruction& i, int) const override {
    return Seconds(seconds(cost_shape_of(plan, *i.segment, *i.op)));
  }
  Seconds communicate(const Plan& plan, const Instruction& i, int) const override { return compute(plan, i, 0); }
  Seconds dispatch() const override { return Seconds(2e-6); }
  Seconds wake() const override { return Seconds(3e-6); }
  static double seconds(const std::vector<int64_t>& shape) {
    double sum = 1000;
    for (const int64_t extent : shape) sum += static_cast<double>(extent);
    return sum * 1e-9;
  }
};

const std::vector<CalibrationPlan>& gpu_plans() {
  static const std::vector<CalibrationPlan> all =
      calibration_plans({.target = CalibrationTarget::kGpu, .group_sizes = {2, 4}, .scale = 0.4});
  return all;
}

}  // namespace

TEST_CASE("calibration of a GPU finds the costs of a made-up one again: products by type, rows, flat ops, copies, collectives") {
  std::vector<CalibrationRun> runs;
  for (const CalibrationPlan& p : gpu_plans()) {
    std::vector<Program> programs;
    for (size_t role = 0; role < p.plan.roles.size(); ++role) programs.push_back(expand_program(p.plan, static_cast<int>(role)));
    runs.push_back({&p, simulate(p.plan, programs, shared_cores(4), MadeUpDevice()), 0});
  }
  const Calibration c = fit(runs, {"2026-01-01", "test", "Some GPU", "cuda 9.0"});
  std::set<std::string> kernels;
  for (const RatePoint& p : c.points) {
    INFO(p.kernel);
    kernels.insert(p.kernel);
    REQUIRE(p.seconds == Approx(MadeUpDevice::seconds(p.shape)).epsilon(1e-6));
  }
  for (const char* kernel :
       {"linear.F", "linear.I", "linear.W", "attention.F", "attention.I", "norm.F", "norm.W.rms", "rope.F", "embed.W",
        "activation.F.swiglu", "residual.F", "cross_entropy.fused", "add", "fill", "adamw", "copy", "p2p"}) {
    INFO(kernel);
    CHECK(kernels.count(kernel) == 1);
  }
  const Machine m = local_gpu_machine(c, "Some GPU", 1, int64_t{140} << 30);
  CHECK(m.device.id == "Some GPU");
  for (const char* precision : {"fp32", "bf16", "fp16"}) CHECK(m.device.peak_flops.at(precision) > 0);
  CHECK(m.device.memory_bytes_per_s > 0);
  const std::string file = to_yaml(m);
  CHECK(file.find("Some GPU") != std::string::npos);
  CHECK(file.find("cuda 9.0") != std::string::npos);
}

TEST_CASE("calibration plans of a GPU lend the library what a case's plan lends it") {
  int products = 0;
  for (const CalibrationPlan& p : gpu_plans()) {
    if (p.name.find("linear") == std::string::npos) continue;
    INFO(p.name);
    const auto& buffers = p.plan.roles[0].buffers;
    const auto found = std::ranges::find(buffers, "workspace.compute", &Buffer::name);
    REQUIRE(found != buffers.end());
    CHECK(found->type.bytes() >= kLibraryWorkspace);
    ++products;
  }
  CHECK(products == 6);  // three types, twice
}

}  // namespace shardlab::testing
