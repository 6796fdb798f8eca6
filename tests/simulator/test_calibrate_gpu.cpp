// Calibration of a GPU without one: its plans are simulated under known costs, the fit must find these again, and the machine file
// says whose they are.
#include <set>

#include "plan/base/attention_calls.h"
#include "simulator/interpreter/bench.h"
#include "simulator/interpreter/calibrate.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/machine_yaml.h"
#include "simulator/interpreter/timeline.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/simulator/plans.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using namespace testing;

/// Every extent of the shape costs two picoseconds, an op a microsecond: copies that fill a pool do not hold up the launches behind.
class MadeUpDevice final : public PlacedCostModel {
 public:
  Seconds compute(const Plan& plan, const Instruction& i, int) const override {
    return Seconds(seconds(cost_shape_of(plan, *i.segment, *i.op)));
  }
  Seconds communicate(const Plan& plan, const Instruction& i, int) const override { return compute(plan, i, 0); }
  Seconds dispatch() const override { return Seconds(2e-6); }
  Seconds wake() const override { return Seconds(3e-6); }
  static double seconds(const std::vector<int64_t>& shape) {
    double sum = 1e-6;
    for (const int64_t extent : shape) sum += static_cast<double>(extent) * 2e-12;
    return sum;
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
  Machine gpu = shared_cores(1);
  Calibration of_gpu;
  of_gpu.launch_ahead = true;
  gpu.calibration = std::make_shared<const Calibration>(of_gpu);
  for (const CalibrationPlan& p : gpu_plans()) {
    std::vector<Program> programs;
    for (size_t role = 0; role < p.plan.roles.size(); ++role) programs.push_back(expand_program(p.plan, static_cast<int>(role)));
    runs.push_back({&p, simulate(p.plan, programs, gpu, MadeUpDevice()), 0});
  }
  const Calibration c = fit(runs, {"2026-01-01", "test", "Some GPU", "cuda 9.0", 0, true});
  CHECK(c.launch_ahead);
  CHECK(c.op_overhead_s == Approx(2e-6));  // launches of ops that are over sooner are as far apart
  std::set<std::string> kernels;
  for (const RatePoint& p : c.points) {
    INFO(p.kernel);
    kernels.insert(p.kernel);
    REQUIRE(p.seconds == Approx(MadeUpDevice::seconds(p.shape)).epsilon(1e-7));
  }
  for (const char* kernel : {"linear.F",
                             "linear.I",
                             "linear.W",
                             "attention.F",
                             "attention.I",
                             "norm.F",
                             "norm.W.rms",
                             "rope.F",
                             "embed.W",
                             "activation.F.swiglu",
                             "residual.F",
                             "cross_entropy.fused",
                             "add",
                             "fill",
                             "adamw",
                             "lion",
                             "adamw8bit",
                             "copy",
                             "p2p",
                             "attention.F.bf16",
                             "norm.W.bf16",
                             "linear.W.canonical",
                             "attention.I.canonical"}) {
    INFO(kernel);
    CHECK(kernels.count(kernel) == 1);
  }
  const Machine m = local_gpu_machine(c, "Some GPU", 1, int64_t{140} << 30);
  CHECK(m.device.id == "Some GPU");
  CHECK(m.id == "Some GPU");
  for (const char* precision : {"fp32", "bf16", "fp16"}) CHECK(m.device.peak_flops.at(precision) > 0);
  CHECK(m.device.memory_bytes_per_s > 0);
  const std::string file = to_yaml(m);
  CHECK(file.find("Some GPU") != std::string::npos);
  CHECK(file.find("cuda 9.0") != std::string::npos);
  CHECK(file.find("launch_ahead: true") != std::string::npos);
}

namespace {

/// Kernel and element types of operands: "norm.W bf16 bf16 f32 -> f32".
std::string signature(const Segment& segment, const Op& op) {
  std::string text = kernel_of(op);
  for (const SlotId s : op.reads) text += fmt::format(" {}", name_of(segment.slots[s.index()].type.dtype));
  text += " ->";
  for (const SlotId s : op.writes) text += fmt::format(" {}", name_of(segment.slots[s.index()].type.dtype));
  return text;
}

void add_signatures(const Plan& plan, std::set<std::string>& to) {
  for (const Segment& segment : plan.segments)
    for (const auto& step : segment.steps)
      if (const auto* op = std::get_if<Op>(&step); op != nullptr && op->label != kPreparation) to.insert(signature(segment, *op));
}

}  // namespace

TEST_CASE("what is calibrated in bf16 on a GPU is what a step in bf16 does, operand by operand") {
  std::set<std::string> of_steps, calibrated;
  for (const Family family : {Family::kGpt, Family::kLlama}) {
    Case c = tiny_case(family);
    c.train.precision = Precision::kBf16;
    c.train.dropout = family == Family::kGpt ? 0.1f : 0.0f;
    const auto plan = lower(c);
    REQUIRE(plan.ok());
    add_signatures(*plan, of_steps);
  }
  for (const CalibrationPlan& p : gpu_plans())
    if (p.name.ends_with("bf16")) add_signatures(p.plan, calibrated);
  REQUIRE(calibrated.size() > 10);
  for (const std::string& s : calibrated) {
    INFO(s);
    CHECK(of_steps.contains(s));
  }
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
