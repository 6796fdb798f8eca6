// Ops that share a device: speeds by hand, then timelines of small plans on it.

#include <fmt/format.h>

#include <map>

#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/device_model.h"
#include "simulator/interpreter/fabric.h"
#include "simulator/interpreter/resources.h"
#include "simulator/interpreter/timeline.h"
#include "tests/namespaces.h"
#include "tests/simulator/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using namespace testing;

Demand demand(std::initializer_list<std::pair<Resource, double>> busy, double held = 0) {
  Demand d;
  for (const auto& [resource, seconds] : busy) d.of(resource) = seconds;
  d.held_units = held;
  return d;
}

/// Two streams of one device, or of two.
constexpr const char* kTwoStreams = R"(shardlab plan 1
name two
mesh dp=2
streams compute side
comm one axes dp
comm two axes dp

segment s
  bound %x activation f32[1000,1000]
  bound %w parameter f32[1000,1000]
  bound %y activation f32[1000,1000]
  bound %h activation f32[1000,1000] host
  bound %z activation f32[1000,1000]
  bound %g gradient f32[1000,1000] dp:P
  bound %k gradient f32[500,1000] dp:P
  local %sum gradient f32[1000,1000] view %g
  local %sum.k gradient f32[500,1000] view %k

{}
role 0
  %x activation f32[1000,1000] persistent
  %w parameter f32[1000,1000] persistent
  %y activation f32[1000,1000] persistent
  %h activation f32[1000,1000] host persistent
  %z activation f32[1000,1000] persistent
  %g gradient f32[1000,1000] dp:P persistent
  %k gradient f32[500,1000] dp:P persistent
  call s (x=%x, w=%w, y=%y, h=%h, z=%z, g=%g, k=%k)
)";

Expanded two_streams(const std::string& ops) { return expanded(fmt::format(fmt::runtime(kTwoStreams), ops)); }

/// A matmul of 1000^3 takes 2 ms of the multiprocessors and 12 us of memory; 4 MB take 4 us of memory, 40 us of a link, 400 us of
/// the network or of a copy engine.
Machine device(int per_node = 8) {
  Machine m;
  m.device.peak_flops = {{"fp32", 1e12}};
  m.device.memory_bytes_per_s = 1e12;
  m.device.link_bytes_per_s = 1e11;
  m.device.constants = {{"host.to_device_bytes_per_s", 1e10}, {"host.from_device_bytes_per_s", 1e10}};
  m.inter_bytes_per_s = 1e10;
  m.devices_per_node = per_node;
  m.nodes = 8 / per_node;
  return m;
}

Efficiency perfect() {
  Efficiency f;
  f.matmul = f.memory = f.link = f.network = 1;
  f.ramp_flops = f.step_latency_s = f.network_latency_s = f.launch_s = f.wake_s = 0;
  return f;
}

/// End of each op of rank 0, by label.
std::map<std::string, double> ends(const Expanded& e, const Trace& trace) {
  std::map<std::string, double> out;
  for (const TraceEvent& event : trace.events)
    if (event.rank == 0 && event.kind == TraceEvent::Kind::kOp)
      out[e.programs[0].instructions[static_cast<size_t>(event.instruction)].op->label] = event.end;
  return out;
}

}  // namespace

TEST_CASE("tasks that fit beside one another keep their speed") {
  DeviceSharing sharing(2, 4);
  const Demand half = demand({{Resource::kMemory, 1}});
  const Demand units = demand({{Resource::kUnits, 2}});
  sharing.start(0, 2, std::vector<DeviceSharing::Part>{{0, &half}}, 0);
  sharing.start(1, 2, std::vector<DeviceSharing::Part>{{0, &half}}, 0);
  CHECK(std::vector<int>(sharing.changed().begin(), sharing.changed().end()) == std::vector<int>{1});
  sharing.start(2, 2, std::vector<DeviceSharing::Part>{{0, &units}}, 0);
  sharing.start(3, 2, std::vector<DeviceSharing::Part>{{1, &units}}, 1);  // another device
  for (const int task : {0, 1, 2}) CHECK(sharing.end_of(task) == 2);
  CHECK(sharing.end_of(3) == 3);
}

TEST_CASE("tasks that ask for more than there is are slowed alike, and sped up when one ends") {
  DeviceSharing sharing(1, 3);
  const Demand all = demand({{Resource::kMemory, 1}}), most = demand({{Resource::kMemory, 0.5}});
  sharing.start(0, 1, std::vector<DeviceSharing::Part>{{0, &all}}, 0);
  sharing.start(1, 1, std::vector<DeviceSharing::Part>{{0, &most}}, 0);
  CHECK(sharing.end_of(0) == Approx(1.5));  // speed 2/3 each: 1 * 2/3 + 0.5 * 2/3 = 1
  CHECK(sharing.end_of(1) == Approx(1.5));
  sharing.start(2, 1, std::vector<DeviceSharing::Part>{{0, &most}}, 0.75);  // speed 1/2 for all, half of each is left
  CHECK(sharing.changed().size() == 3);
  CHECK(sharing.end_of(0) == Approx(1.75));
  CHECK(sharing.end_of(2) == Approx(2.75));
  sharing.finish(0, 1.75);
  sharing.finish(1, 1.75);
  CHECK(sharing.end_of(2) == Approx(2.25));  // half was done by 1.75
}

TEST_CASE("the scarcest resource is shared out first, what it leaves of others goes to the rest") {
  DeviceSharing sharing(2, 3);
  const Demand in = demand({{Resource::kLinkIn, 1}}), out = demand({{Resource::kLinkOut, 1}});
  // Two messages into device 1, from device 0, which sends a third elsewhere: that one gets what the two leave of device 0's link.
  sharing.start(0, 1, std::vector<DeviceSharing::Part>{{1, &in}}, 0);
  sharing.start(1, 1, std::vector<DeviceSharing::Part>{{0, &out}, {1, &in}}, 0);
  CHECK(sharing.end_of(0) == Approx(2));
  CHECK(sharing.end_of(1) == Approx(2));
  sharing.start(2, 1, std::vector<DeviceSharing::Part>{{0, &out}}, 0);
  CHECK(sharing.end_of(1) == Approx(2));
  CHECK(sharing.end_of(2) == Approx(2));
  sharing.finish(0, 1);  // 1 and 2 go on sharing device 0's link out, half of each is left
  CHECK(sharing.end_of(1) == Approx(2));
  sharing.finish(1, 2);
  CHECK(sharing.end_of(2) == Approx(2));
}

TEST_CASE("multiprocessors that a collective holds are lost to kernels, and only to them") {
  DeviceSharing sharing(1, 2);
  const Demand kernel = demand({{Resource::kUnits, 3}, {Resource::kMemory, 1}});
  const Demand collective = demand({{Resource::kLinkOut, 2}}, 0.25);
  sharing.start(0, 3, std::vector<DeviceSharing::Part>{{0, &kernel}}, 0);
  sharing.start(1, 2, std::vector<DeviceSharing::Part>{{0, &collective}}, 0);
  CHECK(sharing.end_of(0) == Approx(4));
  CHECK(sharing.end_of(1) == Approx(2));
  sharing.finish(1, 2);
  CHECK(sharing.end_of(0) == Approx(3.5));  // half was done
}

TEST_CASE("compute on two streams of a device shares it") {
  const Expanded e = two_streams("  linear.F a (%x, %w) -> (%y)\n  linear.F b (%x, %w) -> (%z) @side\n");
  const auto end = ends(e, simulate(*e.plan, e.programs, device(), DatasheetCostModel(device(), Precision::kFp32, perfect())));
  CHECK(end.at("a") == Approx(4e-3));
  CHECK(end.at("b") == Approx(4e-3));
  FixedCostModel fixed;
  const auto apart = ends(e, simulate(*e.plan, e.programs, own_devices(), fixed));
  CHECK(apart.at("a") == Approx(2));  // a model that knows no work takes each op for one that fills the device
  CHECK(apart.at("b") == Approx(2));
}

TEST_CASE("a copy beside a matmul takes from it the memory bandwidth that it needs") {
  const Expanded e = two_streams("  linear.F a (%x, %w) -> (%y)\n  copy b (%x) -> (%z) @side\n");
  Machine m = device();
  m.device.memory_bytes_per_s = 8e9;  // 1 ms for the copy's 8 MB, 1.5 ms of the matmul's 2
  const auto end = ends(e, simulate(*e.plan, e.programs, m, DatasheetCostModel(m, Precision::kFp32, perfect())));
  // Memory is asked for 1 + 3/4: both run at 4/7 until the copy is done at 7/4 ms, with half of the matmul left.
  CHECK(end.at("b") == Approx(1.75e-3));
  CHECK(end.at("a") == Approx(2.75e-3));
}

TEST_CASE("two collectives share the links") {
  Machine m = device();
  m.device.memory_bytes_per_s = 1e15;
  const auto run = [&](const std::string& ops) {
    const Expanded e = two_streams(ops);
    return ends(e, simulate(*e.plan, e.programs, m, DatasheetCostModel(m, Precision::kFp32, perfect())));
  };
  // Of two ranks each sends as much as the buffer holds: 4 MB and 2 MB, 40 and 20 us alone.
  const std::string a = "  all_reduce a (%g) -> (%sum) comm=one\n", b = "  all_reduce b (%k) -> (%sum.k) comm=two @side\n";
  CHECK(run(a).at("a") == Approx(40e-6));
  CHECK(run(b).at("b") == Approx(20e-6));
  const auto both = run(a + b);
  CHECK(both.at("b") == Approx(40e-6));
  CHECK(both.at("a") == Approx(60e-6));
}

TEST_CASE("a collective slows matmuls by the multiprocessors it holds, other kernels by the memory it moves") {
  const Machine m = device();
  const auto run = [&](const std::string& ops) {
    const Expanded e = two_streams(ops);
    return ends(e, simulate(*e.plan, e.programs, m, DatasheetCostModel(m, Precision::kFp32, perfect())));
  };
  const std::string reduce = "  all_reduce reduce (%g) -> (%sum) comm=one @side\n";
  const Fabric fabric = Fabric::of(m).value();
  const double held = DeviceModel::of(m.device)->held_beside(fabric.contention(CollectiveUse::kAllReduce, {2, 1, 1}).taken_sms);
  REQUIRE(held > 0);
  const auto matmul = run("  linear.F a (%x, %w) -> (%y)\n" + reduce);
  CHECK(matmul.at("reduce") == Approx(40e-6));
  CHECK(matmul.at("a") == Approx(2e-3 + 40e-6 * held));
  // The collective moves 3 bytes of memory for each it sends: 12 of 40 us. The copy alone takes 8 us.
  const auto copy = run("  copy a (%x) -> (%z)\n" + reduce);
  const double slower = 1 + fabric.constants().memory_traffic * 4e6 / 1e12 / 40e-6;
  CHECK(copy.at("a") == Approx(8e-6 * slower));
  CHECK(copy.at("reduce") == Approx(40e-6 + 8e-6 * (slower - 1)));
}

TEST_CASE("a copy to the host runs beside a matmul, two of them share the engine") {
  const Machine m = device();
  const auto run = [&](const std::string& ops) {
    const Expanded e = two_streams(ops);
    return ends(e, simulate(*e.plan, e.programs, m, DatasheetCostModel(m, Precision::kFp32, perfect())));
  };
  const double alone = run("  copy out (%x) -> (%h) @side\n").at("out");
  const auto beside = run("  linear.F a (%x, %w) -> (%y)\n  copy out (%x) -> (%h) @side\n");
  CHECK(beside.at("a") == Approx(2e-3));
  CHECK(beside.at("out") == Approx(alone));
  const auto both = run("  copy out (%x) -> (%h)\n  copy again (%z) -> (%h) @side\n");
  CHECK(both.at("again") == Approx(2 * alone));
}

}  // namespace shardlab::testing
