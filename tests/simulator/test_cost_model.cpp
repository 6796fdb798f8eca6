// Interpolation, the three cost models, and changed prices, against figures worked out by hand.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/rate_table.h"
#include "simulator/interpreter/repriced.h"
#include "simulator/interpreter/segments/segments.h"
#include "simulator/interpreter/timeline.h"
#include "tests/namespaces.h"
#include "tests/simulator/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using namespace testing;

/// A Linear of 64 x 128 x 32 with its W, an attention, a norm, an AdamW, messages.
constexpr const char* kOps = R"(shardlab plan 1
name ops
mesh dp=4
streams compute
comm all axes dp

segment s
  bound %x activation f32[2,32,32]
  bound %w parameter f32[128,32]
  bound %y activation f32[2,32,128]
  bound %dw gradient f32[128,32]
  bound %qkv activation f32[2,32,96]
  bound %lse activation f32[2,2,32]
  bound %o activation f32[2,32,32]
  bound %gamma parameter f32[32]
  bound %stats activation f32[2,32,1]
  bound %m moment f32[128,32]
  bound %v moment f32[128,32]
  bound %part gradient f32[32,32]
  bound %odd other f32[7]

  linear.F linear (%x, %w) -> (%y)
  linear.W weight (%x, %y) -> (%dw)
  attention.F attention (%qkv) -> (%o, %lse) heads=2 kv_heads=2 head_dim=16
  norm.F norm (%x, %gamma) -> (%o, %stats) rms
  adamw adamw (%dw, %w, %m, %v) -> (%w, %m, %v)
  reduce_scatter reduce (%dw) -> (%part) comm=all algorithm=direct
  all_gather gather (%part) -> (%dw) comm=all
  send send (%x) -> () comm=all cyclic
  kernel mystery (%odd) -> (%odd) name=mystery flops=1000000

role 0
  %x activation f32[2,32,32] persistent
  %w parameter f32[128,32] persistent
  %y activation f32[2,32,128] persistent
  %dw gradient f32[128,32] persistent
  %qkv activation f32[2,32,96] persistent
  %lse activation f32[2,2,32] persistent
  %o activation f32[2,32,32] persistent
  %gamma parameter f32[32] persistent
  %stats activation f32[2,32,1] persistent
  %m moment f32[128,32] persistent
  %v moment f32[128,32] persistent
  %part gradient f32[32,32] persistent
  %odd other f32[7] persistent
  call s (x=%x, w=%w, y=%y, dw=%dw, qkv=%qkv, lse=%lse, o=%o, gamma=%gamma, stats=%stats, m=%m, v=%v, part=%part, odd=%odd)
)";

const Instruction& op(const Expanded& e, const std::string& label) {
  for (const Instruction& i : e.programs[0].instructions)
    if (i.op != nullptr && i.op->label == label) return i;
  FAIL("no op " << label);
  return e.programs[0].instructions[0];
}

Machine measured(std::vector<RatePoint> points, int cores = 2) {
  Machine m = shared_cores(cores);
  Calibration calibration;
  calibration.points = std::move(points);
  m.calibration = std::make_shared<const Calibration>(std::move(calibration));
  m.device.peak_flops["fp32"] = 1e9;
  m.device.memory_bytes_per_s = 1e9;
  return m;
}

}  // namespace

TEST_CASE("kernels and shapes of ops") {
  const Expanded e = expanded(kOps);
  const auto check = [&](const char* label, const std::string& kernel, const std::vector<int64_t>& shape) {
    const Instruction& i = op(e, label);
    CHECK(kernel_of(*i.op) == kernel);
    CHECK(cost_shape_of(*e.plan, *i.segment, *i.op) == shape);
  };
  check("linear", "linear.F", {64, 128, 32});
  check("weight", "linear.W", {128, 32, 64});
  check("attention", "attention.F", {2, 2, 32, 16});
  check("norm", "norm.F.rms", {64, 32});
  check("adamw", "adamw", {7 * 4 * 128 * 32});
  check("reduce", "reduce_scatter.direct", {4 * 128 * 32, 4});
  check("gather", "all_gather.ring", {4 * 128 * 32, 4});
  check("send", "p2p", {4 * 2 * 32 * 32});
}

/// Ops of experts: 2 of them, of width 32, room for 96 rows, of which 64 are expected. And what 16 bits do to names.
constexpr const char* kTechniques = R"(shardlab plan 1
name techniques
mesh dp=2
streams compute
comm dp axes dp

segment s
  bound %rows activation f32[1,96,32]
  bound %w parameter f32[2,64,32]
  bound %counts activation i32[1,1,2]
  bound %u activation f32[1,96,64]
  bound %a activation f32[1,96,32]
  bound %dw gradient f32[2,64,32]
  bound %logits activation f32[1,32,2]
  bound %weights activation f32[1,32,2]
  bound %choice activation i32[1,32,2]
  bound %g gradient bf16[4096] dp:P
  local %sum gradient bf16[4096] view %g
  bound %wide other f32[4096]
  bound %narrow other bf16[4096]

  route.F router (%logits) -> (%weights, %choice, %counts)
  grouped_linear.F up (%rows, %w, %counts) -> (%u) rows=64
  grouped_linear.W weight (%rows, %u, %counts) -> (%dw) rows=64
  activation.F act (%u, %counts) -> (%a) swiglu counted rows=64
  copy round (%wide) -> (%narrow)
  copy widen (%narrow) -> (%wide)
  all_reduce reduce (%g) -> (%sum) comm=dp algorithm=ring

role 0
  %rows activation f32[1,96,32] persistent
  %w parameter f32[2,64,32] persistent
  %counts activation i32[1,1,2] persistent
  %u activation f32[1,96,64] persistent
  %a activation f32[1,96,32] persistent
  %dw gradient f32[2,64,32] persistent
  %logits activation f32[1,32,2] persistent
  %weights activation f32[1,32,2] persistent
  %choice activation i32[1,32,2] persistent
  %g gradient bf16[4096] dp:P persistent
  %wide other f32[4096] persistent
  %narrow other bf16[4096] persistent
  call s (rows=%rows, w=%w, counts=%counts, u=%u, a=%a, dw=%dw, logits=%logits, weights=%weights, choice=%choice, g=%g, wide=%wide, narrow=%narrow)
)";

TEST_CASE("ops of experts go by the rows that are expected; conversions and sums of 16 bits are kernels of their own") {
  const Expanded e = expanded(kTechniques);
  const auto check = [&](const char* label, const std::string& kernel, const std::vector<int64_t>& shape) {
    const Instruction& i = op(e, label);
    CHECK(kernel_of(*i.segment, *i.op) == kernel);
    CHECK(cost_shape_of(*e.plan, *i.segment, *i.op) == shape);
  };
  check("router", "route.F", {32, 2});
  check("up", "grouped_linear.F", {2, 32, 64, 32});
  check("weight", "grouped_linear.W", {2, 32, 64, 32});
  check("act", "activation.F.swiglu", {64, 32});
  check("round", "copy.convert", {4096 * 6});
  check("widen", "copy.convert.bf16", {4096 * 6});
  check("reduce", "all_reduce.ring.bf16", {4096 * 2, 2});

  // Of a kernel that was not measured in 16 bits the wide one stands in, and says so.
  const auto costs = [&](const std::vector<RatePoint>& points, const char* label, double seconds, bool extrapolated) {
    INFO(label);
    const Machine m = measured(points);
    const CalibratedCostModel model(m);
    const Instruction& i = op(e, label);
    CHECK(model.measured(i));
    CHECK(model.communicate(*e.plan, i, 1).value == Approx(seconds));
    CHECK(model.extrapolates(*e.plan, i) == extrapolated);
  };
  const RatePoint wide{"all_reduce.ring", {4096 * 2, 2}, 1, 3e-6, 0, 1},
      narrow{"all_reduce.ring.bf16", {4096 * 2, 2}, 1, 5e-6, 0, 1};
  costs({wide}, "reduce", 3e-6, true);
  costs({wide, narrow}, "reduce", 5e-6, false);
  costs({{"copy", {4096 * 6}, 1, 2e-6, 0, 1}}, "round", 2e-6, false);
  costs({{"copy", {4096 * 6}, 1, 2e-6, 0, 1}, {"copy.convert", {4096 * 6}, 1, 4e-6, 0, 1}}, "round", 4e-6, false);
  CHECK_FALSE(CalibratedCostModel(measured({wide})).measured(op(e, "up")));
}

TEST_CASE("an op costs what the nearest measured kernel does: of its order, of its element type, of its name") {
  std::string text = kOps;
  for (size_t at = 0; (at = text.find("%x activation f32", at)) != std::string::npos;) text.replace(at, 17, "%x activation bf16");
  const Expanded wide = expanded(kOps), narrow = expanded(text);
  const auto check = [](const Expanded& e, const char* label, const Machine& m, bool canonical, double seconds, bool extrapolated) {
    INFO(label << " " << seconds);
    const CalibratedCostModel model(m, canonical);
    CHECK(model.compute(*e.plan, op(e, label), 1).value == Approx(seconds));
    CHECK(model.extrapolates(*e.plan, op(e, label)) == extrapolated);
  };
  CHECK(kernel_of(*op(narrow, "norm").segment, *op(narrow, "norm").op) == "norm.F.rms.bf16");
  CHECK(kernel_of(*op(wide, "norm").segment, *op(wide, "norm").op) == "norm.F.rms");
  const Machine plain = measured({{"norm.F.rms", {64, 32}, 1, 4e-6, 0, 1}, {"linear.F", {64, 128, 32}, 1, 1e-6, 0, 1}});
  check(wide, "norm", plain, false, 4e-6, false);
  check(narrow, "norm", plain, false, 4e-6, true);  // measured in another element type
  check(wide, "linear", plain, true, 1e-6, false);  // a processor has one kernel for both orders
  const Machine gpu = measured({{"norm.F.rms", {64, 32}, 1, 4e-6, 0, 1},
                                {"norm.F.rms.bf16", {64, 32}, 1, 2e-6, 0, 1},
                                {"linear.F", {64, 128, 32}, 1, 1e-6, 0, 1},
                                {"linear.F.canonical", {64, 128, 32}, 1, 9e-6, 0, 1}});
  check(narrow, "norm", gpu, false, 2e-6, false);
  check(narrow, "norm", gpu, true, 2e-6, false);
  check(wide, "linear", gpu, false, 1e-6, false);
  check(wide, "linear", gpu, true, 9e-6, false);
}

TEST_CASE("a collective among ranks that share a device costs what was measured of all of them") {
  const Expanded e = expanded(kOps);
  const std::vector<RatePoint> points{{"all_gather.ring", {4 * 128 * 32, 4}, 1, 8e-6, 0, 1}};
  Machine m = measured(points, 1);
  CHECK(CalibratedCostModel(m).communicate(*e.plan, op(e, "gather"), 1).value ==
        Approx(2e-6));  // of one core, which four ranks share
  Calibration calibration = *m.calibration;
  calibration.launch_ahead = true;
  m.calibration = std::make_shared<const Calibration>(calibration);
  CHECK_FALSE(m.runs_on_cores());
  CHECK(CalibratedCostModel(m).communicate(*e.plan, op(e, "gather"), 1).value == Approx(8e-6));
}

TEST_CASE("attention within packed documents costs what sequences of one length do, and is extrapolated where nothing is known") {
  const auto packed = [](std::string_view attributes) {
    std::string text = kOps;
    const auto replace = [&](std::string_view from, const std::string& to) {
      const size_t at = text.find(from);
      REQUIRE(at != std::string::npos);
      text.replace(at, from.size(), to);
    };
    replace("  bound %lse", "  bound %positions input i32[2,32] micro:slice\n  bound %lse");
    replace("(%qkv) -> (%o, %lse) heads=2 kv_heads=2 head_dim=16",
            fmt::format("(%qkv, %positions) -> (%o, %lse) heads=2 kv_heads=2 head_dim=16 packed{}", attributes));
    replace("  %lse activation f32[2,2,32] persistent",
            "  %lse activation f32[2,2,32] persistent\n  %positions input i32[2,32] persistent");
    replace("lse=%lse,", "positions=%positions, lse=%lse,");
    return expanded(text);
  };
  const Expanded one = expanded(kOps), known = packed(" document=8"), unknown = packed("");
  const auto shape = [](const Expanded& e) {
    const Instruction& i = op(e, "attention");
    return cost_shape_of(*e.plan, *i.segment, *i.op);
  };
  // Of 32 tokens each sees 8 (1 - mean of (7/8)^n over n = 1 to 32) = 6.3 on average, nearly as in sequences of 12 tokens: (12 + 1)/2.
  CHECK(shape(known) == std::vector<int64_t>{2 * 32 / 12, 2, 12, 16});
  CHECK(shape(unknown) == std::vector<int64_t>{2, 2, 32, 16});
  const CalibratedCostModel model(
      measured({{"attention.F", {2, 2, 32, 16}, 1, 1e-3, 0, 1}, {"attention.F", {5, 2, 12, 16}, 1, 4e-4, 0, 1}}));
  CHECK_FALSE(model.extrapolates(*one.plan, op(one, "attention")));
  CHECK_FALSE(model.extrapolates(*known.plan, op(known, "attention")));
  CHECK(model.extrapolates(*unknown.plan, op(unknown, "attention")));
  CHECK(model.compute(*known.plan, op(known, "attention"), 1).value == Approx(4e-4));
  CHECK(model.compute(*unknown.plan, op(unknown, "attention"), 1).value == Approx(1e-3));
}

TEST_CASE("a table is exact on its points and on every power law") {
  std::vector<std::vector<int64_t>> shapes;
  std::vector<double> seconds;
  for (const int64_t m : {16, 64, 1024})
    for (const int64_t n : {32, 512}) {
      shapes.push_back({m, n});
      seconds.push_back(1e-9 * static_cast<double>(m) * std::sqrt(static_cast<double>(n)));
    }
  const RateTable table(shapes, seconds);
  for (size_t i = 0; i < shapes.size(); ++i) {
    CHECK(table.at(shapes[i]).seconds == Approx(seconds[i]));
    CHECK_FALSE(table.at(shapes[i]).extrapolated);
  }
  const auto at = [&](int64_t m, int64_t n) { return table.at(std::vector<int64_t>{m, n}); };
  CHECK(at(200, 100).seconds == Approx(1e-9 * 200 * 10));
  CHECK_FALSE(at(200, 100).extrapolated);
  CHECK(at(4096, 2048).seconds == Approx(1e-9 * 4096 * std::sqrt(2048.0)));
  CHECK(at(4096, 2048).extrapolated);
  CHECK(at(4, 100).seconds == Approx(1e-9 * 4 * 10));
  CHECK(at(4, 100).extrapolated);
}

TEST_CASE("beyond the grid a slope is kept within reason") {
  const std::vector<std::vector<int64_t>> shapes{{10}, {20}, {40}};
  const RateTable falling(shapes, std::vector<double>{1, 4, 3});
  CHECK(falling.at(std::vector<int64_t>{80}).seconds == Approx(3));                    // not less than the last point
  CHECK(falling.at(std::vector<int64_t>{5}).seconds == Approx(std::pow(2.0, -1.25)));  // slope 2 below, kept at 1.25
  CHECK(falling.at(std::vector<int64_t>{28}).seconds ==
        Approx(std::exp(std::log(4.0) + (std::log(3.0) - std::log(4.0)) * std::log(1.4) / std::log(2.0))));
}

TEST_CASE("points that fill no grid answer with the nearest, scaled") {
  const std::vector<std::vector<int64_t>> shapes{{10, 10}, {100, 100}};
  const RateTable table(shapes, std::vector<double>{1, 90});
  CHECK(table.at(std::vector<int64_t>{10, 10}).seconds == Approx(1));
  CHECK_FALSE(table.at(std::vector<int64_t>{10, 10}).extrapolated);
  CHECK(table.at(std::vector<int64_t>{20, 10}).seconds == Approx(2));
  CHECK(table.at(std::vector<int64_t>{20, 10}).extrapolated);
  CHECK(table.at(std::vector<int64_t>{100, 50}).seconds == Approx(45));
}

TEST_CASE("a calibrated model interpolates in shape and in busy cores") {
  const Expanded e = expanded(kOps);
  const Machine m = measured({{"linear.F", {64, 128, 32}, 1, 2e-6, 0, 1},
                              {"linear.F", {64, 128, 32}, 4, 5e-6, 0, 1},
                              {"norm.F.rms", {32, 32}, 1, 1e-6, 0, 1},
                              {"norm.F.rms", {128, 32}, 1, 4e-6, 0, 1},
                              {"attention.F", {1, 1, 32, 16}, 1, 1e-6, 0, 1},
                              {"attention.F", {1, 8, 32, 16}, 1, 8e-6, 0, 1}},
                             4);
  const CalibratedCostModel costs(m);
  CHECK(costs.compute(*e.plan, op(e, "linear"), 1).value == Approx(2e-6));
  CHECK(costs.compute(*e.plan, op(e, "linear"), 2).value == Approx(3e-6));
  CHECK(costs.compute(*e.plan, op(e, "linear"), 4).value == Approx(5e-6));
  CHECK(costs.compute(*e.plan, op(e, "linear"), 9).value == Approx(5e-6));
  CHECK(costs.compute(*e.plan, op(e, "norm"), 2).value == Approx(2e-6));
  CHECK(costs.compute(*e.plan, op(e, "attention"), 1).value == Approx(4e-6));
  CHECK_FALSE(costs.extrapolates(*e.plan, op(e, "norm")));
  // Nothing was measured for these: flops at the peak, bytes at the bandwidth.
  CHECK(costs.extrapolates(*e.plan, op(e, "mystery")));
  CHECK(costs.compute(*e.plan, op(e, "mystery"), 1).value == Approx(1e-3));
  CHECK(costs.compute(*e.plan, op(e, "adamw"), 1).value == Approx(7 * 4 * 128 * 32 * 1e-9).epsilon(0.15));
}

TEST_CASE("a group that outnumbers the cores goes by one that does not; else it is shared once, not twice") {
  const Expanded e = expanded(kOps);
  const RatePoint four{"reduce_scatter.direct", {4 * 128 * 32, 4}, 1, 8e-6, 0, 1};
  const RatePoint two{"reduce_scatter.direct", {4 * 128 * 32 * 3 / 2, 2}, 1, 3e-6, 0, 1};
  const auto seconds = [&](std::vector<RatePoint> points) {
    return CalibratedCostModel(measured(std::move(points))).communicate(*e.plan, op(e, "reduce"), 2).value;
  };
  CHECK(seconds({four, two}) == Approx(3e-6));
  CHECK(seconds({four}) == Approx(4e-6));  // 4 ranks on 2 cores took 8
}

TEST_CASE("a group larger than any measured goes by what moves as much in a step") {
  const Expanded e = expanded(kOps);
  const int64_t full = 4 * 128 * 32;
  // Four ranks send three quarters of the buffer at once where two would send half of one half as large again.
  CHECK(CalibratedCostModel(measured({{"reduce_scatter.direct", {full * 3 / 2, 2}, 1, 3e-6, 0, 1}}, 4))
            .communicate(*e.plan, op(e, "reduce"), 1)
            .value == Approx(3e-6));
  // A ring of four sends a quarter in each of three steps, one of two half of half as much in its only one.
  const CalibratedCostModel ring(measured({{"all_gather.ring", {full / 2, 2}, 1, 5e-6, 0, 1}}, 2));
  CHECK(ring.communicate(*e.plan, op(e, "gather"), 1).value == Approx(15e-6));
  CHECK_FALSE(ring.extrapolates(*e.plan, op(e, "gather")));
  CHECK(ring.step_among(*e.plan, op(e, "gather"), std::vector<int>{0, 1, 2, 3}).value == Approx(5e-6));
  // Fewer bytes than the fewest measured are no less of a step, and no guess; more cores at work than were measured are one.
  const RatePoint larger{"all_gather.ring", {2 * full, 2}, 1, 5e-6, 0, 1};
  CHECK(CalibratedCostModel(measured({larger}, 2)).communicate(*e.plan, op(e, "gather"), 1).value == Approx(3 * 2.5e-6));
  const RatePoint least{"all_gather.ring", {full, 2}, 1, 5e-6, 0, 1};
  const CalibratedCostModel small(measured({least}, 2)), many_cores(measured({least}, 4));
  CHECK(small.communicate(*e.plan, op(e, "gather"), 1).value == Approx(15e-6));
  CHECK_FALSE(small.extrapolates(*e.plan, op(e, "gather")));
  CHECK(many_cores.extrapolates(*e.plan, op(e, "gather")));
  // A point among one rank says nothing of groups.
  const CalibratedCostModel alone(measured({{"all_gather.ring", {full, 1}, 1, 5e-6, 0, 1}}, 2));
  CHECK(std::isfinite(alone.communicate(*e.plan, op(e, "gather"), 1).value));
}

TEST_CASE("handing a core on costs what calibration measured") {
  Machine m = measured({{"copy", {64}, 1, 1e-6, 0, 1}});
  Calibration c = *m.calibration;
  c.handover_s = 4e-6;
  c.turn_s = 3e-3;
  m.calibration = std::make_shared<const Calibration>(c);
  const CalibratedCostModel costs(m);
  CHECK(costs.handover().value == 4e-6);
  CHECK(costs.turn().value == 3e-3);
}

TEST_CASE("a data sheet model adds up latency and bandwidth") {
  const Expanded e = expanded(kOps);
  Machine m;
  m.device.peak_flops = {{"fp32", 1e12}, {"bf16", 4e12}};
  m.device.memory_bytes_per_s = 1e12;
  m.device.link_bytes_per_s = 1e11;
  m.inter_bytes_per_s = 1e10;
  m.devices_per_node = 8;
  Efficiency f;
  f.ramp_flops = 0;
  f.matmul = f.memory = f.link = f.network = 0.5;
  f.step_latency_s = 1e-6;
  f.network_latency_s = 1e-5;
  const double flops = 2.0 * 64 * 128 * 32, bytes = 4.0 * (64 * 32 + 128 * 32 + 64 * 128);
  CHECK(DatasheetCostModel(m, Precision::kFp32, f).compute(*e.plan, op(e, "linear"), 1).value ==
        Approx(std::max(flops / 5e11, bytes / 5e11)));
  CHECK(DatasheetCostModel(m, Precision::kFp8, f).compute(*e.plan, op(e, "linear"), 1).value ==
        Approx(std::max(flops / 2e12, bytes / 5e11)));
  const double gathered = 4.0 * 128 * 32;
  // Four ranks of one node: three steps of the ring, three quarters of the bytes.
  CHECK(DatasheetCostModel(m, Precision::kFp32, f).communicate(*e.plan, op(e, "gather"), 1).value ==
        Approx(3e-6 + 0.75 * gathered / 5e10));
  // Two on each of two nodes: two network cards share the ring's traffic.
  m.devices_per_node = 2;
  CHECK(DatasheetCostModel(m, Precision::kFp32, f).communicate(*e.plan, op(e, "gather"), 1).value ==
        Approx(3e-5 + 0.75 * gathered / 1e10));
  CHECK(DatasheetCostModel(m, Precision::kFp32, f).communicate(*e.plan, op(e, "send"), 1).value ==
        Approx(1e-5 + 4.0 * 2 * 32 * 32 / 5e9));
}

TEST_CASE("a message costs the way between its two ranks, a collective its own group") {
  const Expanded e = expanded(kOps);
  Machine m;
  m.device.peak_flops = {{"fp32", 1e12}};
  m.device.memory_bytes_per_s = 1e12;
  m.device.link_bytes_per_s = 1e11;
  m.inter_bytes_per_s = 1e10;
  m.devices_per_node = 3;  // ranks 0 to 2 on one node, 3 on the next
  Efficiency f;
  f.link = f.network = 1;
  f.step_latency_s = 1e-6;
  f.network_latency_s = 1e-5;
  const DatasheetCostModel costs(m, Precision::kFp32, f);
  const auto among = [&](const char* label, std::vector<int> ranks) {
    return costs.communicate_among(*e.plan, op(e, label), ranks, 1).value;
  };
  const double sent = 4.0 * 2 * 32 * 32, gathered = 4.0 * 128 * 32;
  CHECK(among("send", {0, 1}) == Approx(1e-6 + sent / 1e11));
  CHECK(among("send", {2, 3}) == Approx(1e-5 + sent / 1e10));
  CHECK(among("send", {3, 0}) == Approx(1e-5 + sent / 1e10));
  CHECK(among("gather", {0, 1}) == Approx(1e-6 + gathered / 2 / 1e11));
  CHECK(among("gather", {0, 1, 2, 3}) == Approx(3e-5 + 0.75 * gathered / 1e10));  // a single device on the second node
  // Where nobody says between which ranks, it is the slowest hop of the group.
  CHECK(costs.communicate(*e.plan, op(e, "send"), 1).value == Approx(1e-5 + sent / 1e10));
}

TEST_CASE("copies between memories cost what the device model says, ops on host memory their bytes at a copy engine's rate") {
  const Expanded e = expanded(R"(shardlab plan 1
name places
mesh dp=1
streams compute

segment s
  bound %x activation f32[250000]
  bound %h activation f32[250000] host
  bound %i activation f32[250000] host
  bound %n activation f32[250000] nvme

  copy out (%x) -> (%h)
  copy in (%h) -> (%x)
  add sum (%h, %i) -> (%i)
  copy store (%h) -> (%n)
  copy load (%n) -> (%h)

role 0
  %x activation f32[250000] persistent
  %h activation f32[250000] host persistent
  %i activation f32[250000] host persistent
  %n activation f32[250000] nvme persistent
  call s (x=%x, h=%h, i=%i, n=%n)
)");
  Machine m;
  m.devices_per_node = 4;
  m.device.peak_flops = {{"fp32", 1e12}};
  m.device.memory_bytes_per_s = 1e12;
  m.device.link_bytes_per_s = 1e11;
  m.device.constants = {{"host.to_device_bytes_per_s", 2e10}, {"host.from_device_bytes_per_s", 1e10}, {"host.copy_start_s", 1e-6},
                        {"nvme.read_bytes_per_s", 4e9},       {"nvme.write_bytes_per_s", 2e9},        {"nvme.start_s", 1e-4}};
  const DatasheetCostModel costs(m, Precision::kFp32);
  const auto seconds = [&](const char* label) { return costs.compute(*e.plan, op(e, label), 1).value; };
  CHECK(seconds("out") == Approx(1e-6 + 1e6 / 1e10));
  CHECK(seconds("in") == Approx(1e-6 + 1e6 / 2e10));
  CHECK(seconds("sum") == Approx(1e-6 + 3e6 / 1e10));
  CHECK(seconds("store") == Approx(1e-4 + 4 * 1e6 / 2e9));
  CHECK(seconds("load") == Approx(1e-4 + 4 * 1e6 / 4e9));
  // A copy keeps its engine and, for its part, device memory; what the host does asks nothing of the device.
  const auto asks = [&](const char* label) { return costs.demand(*e.plan, op(e, label), {}, Seconds(seconds(label))); };
  CHECK(asks("out").of(Resource::kToHost) == Approx(seconds("out")));
  CHECK(asks("out").of(Resource::kMemory) == Approx(1e6 / 0.8e12));
  CHECK(asks("in").of(Resource::kToDevice) == Approx(seconds("in")));
  CHECK(asks("sum").busy_s == Demand{}.busy_s);
  CHECK(asks("load").busy_s == Demand{}.busy_s);
}

TEST_CASE("a machine of several devices that nothing joins is refused") {
  Machine m;
  m.devices_per_node = 2;
  m.device.peak_flops = {{"fp32", 1e12}};
  m.device.memory_bytes_per_s = 1e12;
  CHECK_FALSE(cost_model_for(m, Precision::kFp32).ok());
  m.device.link_bytes_per_s = 1e11;
  CHECK(cost_model_for(m, Precision::kFp32).ok());
  m.nodes = 2;
  CHECK_FALSE(cost_model_for(m, Precision::kFp32).ok());
}

TEST_CASE("a machine without figures is refused with the remedy") {
  Machine local;
  local.local = true;
  const auto unmeasured = cost_model_for(local, Precision::kFp32);
  REQUIRE_FALSE(unmeasured.ok());
  CHECK(unmeasured.error().code == ExitCode::kEnvironment);
  CHECK(unmeasured.error().hint.find("shardlab calibrate") != std::string::npos);
  Machine bare;
  CHECK_FALSE(cost_model_for(bare, Precision::kFp32).ok());
  bare.device.memory_bytes_per_s = 1e12;
  bare.device.peak_flops["bf16"] = 1e12;
  CHECK(cost_model_for(bare, Precision::kFp8).ok());
  CHECK_FALSE(cost_model_for(bare, Precision::kFp32).ok());
}

TEST_CASE("changed prices: words name classes, kinds, strategies and labels, and change what they name") {
  const Expanded e = expanded(kOps);
  FixedCostModel fixed;
  fixed.seconds = {{"linear", 8}, {"weight", 4}, {"send", 2}};
  fixed.dispatch_s = 0.5;
  const auto changed = [&](std::vector<PriceChange> changes) { return RepricedCostModel(fixed, *e.plan, changes); };
  const auto seconds = [&](const RepricedCostModel& costs, const std::string& label) {
    const Instruction& i = op(e, label);
    return (label == "send" ? costs.communicate(*e.plan, i, 1) : costs.compute(*e.plan, i, 1)).value;
  };

  CHECK(seconds(changed({{"linear", 0.5}}), "linear") == 4);
  CHECK(seconds(changed({{"linear", 0.5}}), "weight") == 2);    // the kind has both
  CHECK(seconds(changed({{"linear.W", 0.5}}), "linear") == 8);  // the phase one of them
  CHECK(seconds(changed({{"linear.W", 0.5}}), "weight") == 2);
  CHECK(seconds(changed({{"weight", 0.5}}), "weight") == 2);  // a label
  CHECK(seconds(changed({{"compute", 0}}), "linear") == 0);
  CHECK(seconds(changed({{"compute", 0}}), "send") == 2);
  CHECK(seconds(changed({{"communication", 0.25}}), "send") == 0.5);
  CHECK(seconds(changed({{"linear", 0.5}, {"compute", 0.5}}), "linear") == 2);  // both name it
  CHECK(seconds(changed({{"lin", 0}}), "linear") == 8);                         // no beginning of a word
  CHECK(changed({{"launch", 0.5}}).dispatch().value == 0.25);

  const Instruction& linear = op(e, "linear");
  const auto demand = [&](const RepricedCostModel& costs, double alone) {
    return costs.demand(*e.plan, linear, {}, Seconds(alone)).of(Resource::kUnits);
  };
  CHECK(demand(changed({{"linear", 0.5}}), 4) == 4);  // of the multiprocessors, for all of its time
  CHECK(demand(changed({{"linear", 0}}), 0) == 0);

  const std::vector<PriceWord> words = words_of_prices(*e.plan);
  const auto sort = [&](std::string_view word) {
    const auto found = std::ranges::find(words, word, &PriceWord::word);
    return found == words.end() ? std::string() : std::string(name_of(found->sort));
  };
  CHECK(sort("compute") == "class");
  CHECK(sort("communication") == "class");
  CHECK(sort("copies").empty());  // the plan has none
  CHECK(sort("launch") == "host");
  CHECK(sort("linear.W") == "kind");
  CHECK(sort("linear") == "kind");  // also a label, which is said once
  CHECK(sort("weight") == "label");
}

TEST_CASE("changed prices: what hid before is exposed after, and the two timelines agree") {
  const Expanded e = expanded(kOverlap);
  FixedCostModel fixed;
  fixed.seconds = {{"a", 1}, {"reduce", 5}, {"b", 3}, {"c", 1}};
  SegmentTimeline segments(*e.plan, e.programs);
  const Machine machine = own_devices();
  const auto step = [&](std::vector<PriceChange> changes) {
    const RepricedCostModel costs(fixed, *e.plan, changes);
    const double by_ops = step_seconds(simulate(*e.plan, e.programs, machine, costs));
    CHECK(segments.step(machine, costs).seconds == Approx(by_ops));
    return by_ops;
  };
  CHECK(step({}) == Approx(7));                               // 1 + max(5, 3) + 1
  CHECK(step({{"all_reduce", 0}}) == Approx(5));              // 1 + 3 + 1
  CHECK(step({{"all_reduce", 0.5}}) == Approx(5));            // twice as fast is as good: b takes 3
  CHECK(step({{"b", 0}}) == Approx(7));                       // nothing: it hid behind the sum
  CHECK(step({{"b", 0}, {"all_reduce", 0.2}}) == Approx(3));  // 1 + 1 + 1
  CHECK(step({{"compute", 0.5}}) == Approx(6));               // 0.5 + 5 + 0.5
  CHECK(occupied_by(*e.plan, e.programs, fixed, "communication") == 5);
  CHECK(occupied_by(*e.plan, e.programs, fixed, "compute") == 5);
  CHECK(occupied_by(*e.plan, e.programs, fixed, "b") == 3);
}

}  // namespace shardlab::testing
