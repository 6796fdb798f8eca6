// The loop of calibration without a clock: plans are simulated under known costs, and the fit must find these again.

#include <map>
#include <set>

#include "plan/text.h"
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

/// A made-up machine: every extent of the shape costs a nanosecond, an op 7 more a busy core.
class MadeUpCosts final : public PlacedCostModel {
 public:
  Seconds compute(const Plan& plan, const Instruction& i, int busy) const override {
    return Seconds(seconds(cost_shape_of(plan, *i.segment, *i.op), busy));
  }
  Seconds communicate(const Plan& plan, const Instruction& i, int) const override { return compute(plan, i, 0); }
  Seconds dispatch() const override { return Seconds(5e-7); }
  Seconds wake() const override { return Seconds(3e-6); }
  Seconds handover() const override { return Seconds(2e-6); }
  static double seconds(const std::vector<int64_t>& shape, int busy) {
    double sum = 1000 + 7 * busy;
    for (const int64_t extent : shape) sum += static_cast<double>(extent);
    return sum * 1e-9;
  }
};

const std::vector<CalibrationPlan>& plans() {
  static const std::vector<CalibrationPlan> all = calibration_plans({.cores = 2, .group_sizes = {2, 4}, .scale = 0.4});
  return all;
}

/// Every plan simulated for as many steps as it asks for.
std::vector<CalibrationRun> simulated_runs(const Machine& machine) {
  std::vector<CalibrationRun> runs;
  for (const CalibrationPlan& p : plans()) {
    std::vector<Program> programs;
    for (size_t role = 0; role < p.plan.roles.size(); ++role) programs.push_back(expand_program(p.plan, static_cast<int>(role)));
    runs.push_back({&p, simulate(p.plan, programs, machine, MadeUpCosts()), 0});
  }
  return runs;
}

}  // namespace

TEST_CASE("calibration finds the costs of a made-up machine again") {
  const Calibration c = fit(simulated_runs(shared_cores(2)), {"2026-01-01", "test", "made-up", "none", 3e-3});
  CHECK(c.op_overhead_s == Approx(5e-7).epsilon(1e-6));
  CHECK(c.wake_latency_s == Approx(3e-6).epsilon(1e-6));
  CHECK(c.handover_s == Approx(2e-6).epsilon(1e-6));
  CHECK(c.turn_s == 3e-3);
  std::set<std::string> kernels;
  for (const RatePoint& p : c.points) {
    INFO(p.kernel << " " << p.concurrency);
    kernels.insert(p.kernel);
    const bool message = p.kernel == "p2p" || p.kernel.starts_with("all_") || p.kernel.starts_with("reduce_");
    REQUIRE(p.seconds == Approx(MadeUpCosts::seconds(p.shape, message ? 0 : p.concurrency)).epsilon(1e-6));
    REQUIRE(p.repeats >= 1);
    REQUIRE(p.concurrency <= (message ? 1 : 2));
    if (message && p.kernel != "p2p") REQUIRE(p.shape[1] == 2);  // as many ranks as cores
  }
  // Every op that a step of today's strategies is made of.
  for (const char* kernel : {"load_batch",
                             "embed.F",
                             "embed.W",
                             "positions.F",
                             "positions.W",
                             "norm.F",
                             "norm.I",
                             "norm.W",
                             "norm.F.rms",
                             "norm.I.rms",
                             "norm.W.rms",
                             "linear.F",
                             "linear.I",
                             "linear.W",
                             "linear.F.bias",
                             "linear.W.bias",
                             "rope.F",
                             "rope.I",
                             "attention.F",
                             "attention.I",
                             "activation.F.gelu",
                             "activation.I.gelu",
                             "activation.F.swiglu",
                             "activation.I.swiglu",
                             "residual.F",
                             "residual.W",
                             "dropout.F",
                             "dropout.I",
                             "cross_entropy.fused",
                             "cross_entropy.loss-only",
                             "cross_entropy.max",
                             "cross_entropy.sum",
                             "cross_entropy.grad",
                             "add",
                             "fill",
                             "sum_scalars",
                             "squared_norm",
                             "sgd",
                             "adamw",
                             "lion",
                             "adamw8bit",
                             "copy",
                             "all_reduce.ring",
                             "all_reduce.direct",
                             "all_reduce.halving-doubling",
                             "reduce_scatter.ring",
                             "reduce_scatter.direct",
                             "reduce_scatter.halving-doubling",
                             "all_gather.ring",
                             "all_gather.direct",
                             "all_gather.halving-doubling",
                             "p2p"}) {
    INFO(kernel);
    CHECK(kernels.count(kernel) == 1);
  }
}

TEST_CASE("kernels that an older version did not measure are named") {
  Calibration c = fit(simulated_runs(shared_cores(2)), {});
  CHECK(kernels_not_measured(c).empty());
  std::erase_if(c.points, [](const RatePoint& p) { return p.kernel == "adamw8bit" || p.kernel == "linear.F.bf16"; });
  CHECK(kernels_not_measured(c) == std::vector<std::string>{"adamw8bit", "linear.F.bf16"});
}

TEST_CASE("one core still measures groups, by ranks that share it") {
  const std::vector<CalibrationPlan> all = calibration_plans({.cores = 1, .scale = 0.1});
  std::map<std::string, bool> crowded;
  for (const CalibrationPlan& p : all) crowded[p.name] = p.crowded;
  CHECK(crowded.at("calibration collectives x2"));
  CHECK(crowded.at("calibration overhead x1"));
  CHECK_FALSE(crowded.at("calibration linear x1"));
  CHECK(crowded.count("calibration collectives x4") == 0);
}

TEST_CASE("how steady a machine was is the middle spread of its long products") {
  Calibration c;
  for (const double spread : {0.5, 0.1, 0.3}) c.points.push_back({"linear.F", {1, 1, 1}, 1, 4e-5, spread, 9});
  c.points.push_back({"linear.W.bias", {1, 1, 1}, 2, 4e-5, 0.7, 9});
  c.points.push_back({"linear.F", {1, 1, 1}, 1, 1e-6, 9, 9});  // too short to tell from the clock
  c.points.push_back({"copy", {1}, 1, 1e-3, 9, 9});
  CHECK(spread_of_products(c) == std::map<int, double>{{1, 0.3}, {2, 0.7}});
}

TEST_CASE("the points of every kernel fill a grid, so that shapes between them are interpolated") {
  const Calibration c = fit(simulated_runs(shared_cores(2)), {});
  std::map<std::pair<std::string, int>, std::vector<std::vector<int64_t>>> shapes;
  for (RatePoint p : c.points) {
    if (p.kernel.starts_with("attention")) p.shape = {p.shape[0] * p.shape[1], p.shape[2], p.shape[3]};  // one extent to the model
    shapes[{p.kernel, p.concurrency}].push_back(p.shape);
  }
  for (const auto& [key, points] : shapes) {
    INFO(key.first << " x" << key.second);
    std::vector<std::set<int64_t>> axes(points[0].size());
    for (const auto& shape : points)
      for (size_t d = 0; d < shape.size(); ++d) axes[d].insert(shape[d]);
    size_t cells = 1;
    for (const auto& axis : axes) cells *= axis.size();
    CHECK(points.size() == cells);
  }
}

TEST_CASE("calibration plans survive their text form") {
  for (const CalibrationPlan& p : plans()) {
    INFO(p.name);
    const std::string text = print(p.plan);
    const Result<Plan> parsed = parse_plan(text);
    REQUIRE(parsed.ok());
    REQUIRE(print(*parsed) == text);
  }
}

TEST_CASE("medians, spread and steps to skip") {
  const CalibrationPlan* p2p = nullptr;
  for (const CalibrationPlan& p : plans())
    if (p.name.find("p2p") != std::string::npos) p2p = &p;
  REQUIRE(p2p != nullptr);
  const Expanded e{std::make_unique<Plan>(p2p->plan), {}};
  const Program receiver = expand_program(p2p->plan, 1);
  const Instruction* recv = nullptr;
  for (const Instruction& i : receiver.instructions)
    if (i.op != nullptr && std::holds_alternative<Recv>(i.op->work)) recv = recv == nullptr ? &i : recv;
  REQUIRE(recv != nullptr);
  CalibrationRun run{p2p, {}, 1};
  run.trace.world_size = 2;
  run.trace.steps = 6;
  for (int step = 0; step < 6; ++step) {
    TraceEvent event;
    event.rank = 1;
    event.instruction = recv->id;
    event.step = step;
    event.begin = 1;
    event.end = 1 + (step == 0 ? 100 : step);  // 1 to 5 seconds count, a quarter second of each a wait
    event.peer_wait = 0.25;
    run.trace.events.push_back(event);
  }
  const Calibration c = fit(std::span(&run, 1), {});
  REQUIRE(c.points.size() == 1);
  CHECK(c.points[0].kernel == "p2p");
  CHECK(c.points[0].shape == std::vector<int64_t>{1024});
  CHECK(c.points[0].seconds == Approx(2.75));
  CHECK(c.points[0].spread == Approx((4.35 - 1.15) / 2.75));
  CHECK(c.points[0].repeats == 5);
}

TEST_CASE("a machine file states everything, doubles in full") {
  Calibration c;
  c.id = "2026-01-01-0badcafe";
  c.date = "2026-01-01";
  c.command = "shardlab calibrate";
  c.processor = "Some \"CPU\"";
  c.kernel_variant = "x86-64-v4";
  c.op_overhead_s = 1.0 / 3;
  c.wake_latency_s = 2e-5;
  c.handover_s = 5e-6;
  c.turn_s = 3e-3;
  c.points = {{"linear.F", {64, 128, 32}, 1, 1e-5, 0.125, 6},
              {"linear.F", {64, 64, 64}, 2, 2e-5, 0, 6},
              {"adamw", {1 << 25}, 1, 0.5, 0, 6}};
  const Machine m = local_machine(c, 2, int64_t{1} << 34);
  CHECK(m.device.peak_flops.at("fp32") == Approx(2.0 * 64 * 128 * 32 / 1e-5));
  CHECK(m.device.memory_bytes_per_s == Approx((1 << 25) / 0.5));
  CHECK(m.devices() == 2);
  REQUIRE_GOLDEN("simulator/machine.yaml", to_yaml(m));
}

}  // namespace shardlab::testing
