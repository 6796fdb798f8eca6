// Machines: what ships, what a machine file may say, calibrated files.
#include "sweeps/machines.h"

#include <algorithm>

#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

/// A device's file carries its own id; a node's file takes its device from one of those.
bool names_a_device(const std::string& name) { return load_machine(name)->device.id == name; }

}  // namespace

TEST_CASE("shipped machines are whole and sourced") {
  const auto names = list_machines();
  CHECK(names.size() == 47);  // 34 devices and 13 kinds of node
  CHECK(std::is_sorted(names.begin(), names.end()));
  for (const std::string& name : names) {
    INFO(name);
    const auto machine = load_machine(name);
    REQUIRE(machine.ok());
    CHECK(machine->id == name);
    CHECK_FALSE(machine->local);
    CHECK(machine->device.memory_bytes > int64_t{10} << 30);
    CHECK(machine->device.memory_bytes < int64_t{300} << 30);
    CHECK(machine->device.memory_bytes_per_s > 1e11);
    CHECK(machine->device.link_bytes_per_s > 1e10);
    REQUIRE_FALSE(machine->device.peak_flops.empty());
    for (const auto& [precision, flops] : machine->device.peak_flops) {
      INFO(precision);
      CHECK(flops > 1e13);
      CHECK(machine->device.provenance.contains("peak_flops." + precision));
    }
    for (const char* constant : {"memory", "memory_bandwidth", "link_bandwidth"})
      CHECK(machine->device.provenance.contains(constant));
    CHECK_FALSE(machine->device.architecture.empty());
    CHECK(machine->device.constants.size() >= 25);
    for (const auto& [constant, value] : machine->device.constants) {
      INFO(constant);
      CHECK(value > 0);
      CHECK(machine->device.provenance.contains(constant));
    }
    for (const auto& [constant, value] : machine->fabric) {
      INFO(constant);
      CHECK(machine->device.provenance.contains("fabric." + constant));
    }
    if (!names_a_device(name)) CHECK_FALSE(machine->fabric.empty());
    if (machine->devices_per_node > 1) CHECK(machine->inter_bytes_per_s >= 25e9);
  }
}

TEST_CASE("a shipped node has the figures of its sources") {
  const auto h100 = load_machine("hgx-h100-ndr");
  REQUIRE(h100.ok());
  CHECK(h100->device.id == "h100-sxm5-80gb");
  CHECK(h100->devices() == 8);
  CHECK(h100->inter_bytes_per_s == 50e9);
  CHECK(h100->device.link_bytes_per_s == 450e9);
  CHECK(h100->device.memory_bytes_per_s == 3.35e12);
  CHECK(h100->device.peak_flops.at("bf16") == 989e12);
  CHECK(h100->device.peak_flops.at("fp8") == 1979e12);
  CHECK(h100->device.power_w == 700);
  CHECK(h100->device.memory_bytes == 84'932'558'848);
  CHECK(load_machine("gb200-nvl72")->devices() == 72);
  CHECK(load_machine("local").error().hint == "the machine at hand is machine: {local: true}");
  CHECK(load_machine("hgx-h100-nrd").error().message == "no machine is named `hgx-h100-nrd`, did you mean `hgx-h100-ndr`?");
}

TEST_CASE("a node takes its device from a preset and adds to it") {
  const auto m = parse_machine(R"(
id: mine
devices_per_node: 4
nodes: 2
inter_bandwidth: {value: 12.5e9, provenance: measured}
device:
  preset: a100-sxm4-80gb
  id: my-a100
  memory_bandwidth: 1.9e12
  peak_flops: {bf16: 3e14}
  constants: {memory.norm: {value: 0.7, provenance: measured}, sms: 100}
fabric: {rails_per_node: 2, oversubscription: {value: 3, provenance: measured}}
)",
                               "m.yaml");
  REQUIRE(m.ok());
  const auto a100 = load_machine("a100-sxm4-80gb");
  CHECK(m->device.id == "my-a100");
  CHECK(m->device.architecture == "ampere");
  CHECK(m->device.memory_bytes == a100->device.memory_bytes);
  CHECK(m->device.memory_bytes_per_s == 1.9e12);
  CHECK(!m->device.provenance.contains("memory_bandwidth"));  // replaced by a number that says nothing of itself
  CHECK(m->device.provenance.at("memory") == a100->device.provenance.at("memory"));
  CHECK(m->device.provenance.at("inter_bandwidth") == Provenance::kMeasured);
  CHECK(m->device.peak_flops.at("bf16") == 3e14);
  CHECK(m->device.peak_flops.at("fp16") == 3.12e14);
  CHECK(m->device.constants.at("memory.norm") == 0.7);
  CHECK(m->device.provenance.at("memory.norm") == Provenance::kMeasured);
  CHECK(m->device.constants.at("sms") == 100);
  CHECK(!m->device.provenance.contains("sms"));
  CHECK(m->device.constants.at("matmul.ramp_k") == a100->device.constants.at("matmul.ramp_k"));
  CHECK(m->fabric.at("oversubscription") == 3);
  CHECK(m->device.provenance.at("fabric.oversubscription") == Provenance::kMeasured);
}

TEST_CASE("a preset that does not exist, and constants that are no numbers, are told with their places") {
  const auto m = parse_machine("id: mine\ndevice:\n  preset: a1000\n  constants: {sms: many}\nfabric: 3\n", "m.yaml");
  REQUIRE_FALSE(m.ok());
  const std::string text = to_string(m.error());
  CHECK(text.find("m.yaml:3:11: no machine is named `a1000`") != std::string::npos);
  CHECK(text.find("m.yaml:4:20: `sms` of `device` is `many`") != std::string::npos);
  CHECK(text.find("m.yaml:5:9: `fabric` of the machine is `3`") != std::string::npos);
}

TEST_CASE("a calibrated machine file is read whole") {
  const auto machine = parse_machine(R"(
id: my-cpu
local: true
cores: 2
devices_per_node: 2
nodes: 1
device: {memory: 8Gi, memory_bandwidth: 1.25e+10, peak_flops: {fp32: 1.1e+11}, link_bandwidth: 5e9, power_w: 0}
inter_bandwidth: 0
calibration:
  id: 2026-11-21-abc
  date: "2026-11-21T10:00:00Z"
  command: shardlab calibrate
  processor: "Some CPU @ 2.0GHz"
  kernel_variant: avx512
  op_overhead_s: 4e-07
  wake_latency_s: 6.5e-06
  points:
    - {kernel: linear.F, shape: [128, 512, 128], concurrency: 2, seconds: 0.00012, spread: 0.05, repeats: 40}
    - {kernel: all_reduce, shape: [1024, 2], seconds: 1.0000000000000001e-05}
)",
                                     "m.yaml");
  REQUIRE(machine.ok());
  CHECK(machine->local);
  CHECK(machine->cores == 2);
  CHECK(machine->device.memory_bytes == int64_t{8} << 30);
  CHECK(machine->device.peak_flops.at("fp32") == 1.1e11);
  CHECK(machine->device.provenance.empty());
  REQUIRE(machine->calibration);
  CHECK(machine->calibration->id == "2026-11-21-abc");
  CHECK(machine->calibration->processor == "Some CPU @ 2.0GHz");
  CHECK(machine->calibration->op_overhead_s == 4e-7);
  CHECK(machine->calibration->wake_latency_s == 6.5e-6);
  REQUIRE(machine->calibration->points.size() == 2);
  CHECK(machine->calibration->points[0].shape == std::vector<int64_t>{128, 512, 128});
  CHECK(machine->calibration->points[0].concurrency == 2);
  CHECK(machine->calibration->points[0].repeats == 40);
  CHECK(machine->calibration->points[1].concurrency == 1);
  CHECK(machine->calibration->points[1].seconds == 1.0000000000000001e-05);
}

TEST_CASE("a machine file says all that is wrong with it") {
  const auto result = parse_machine(R"(id: x
nodes: 0
devise: {}
device:
  memory: {value: 8Gi, provenance: guess}
  memory_bandwidth: -1
  peak_flops: 3
)",
                                    "m.yaml");
  REQUIRE_FALSE(result.ok());
  const std::string text = to_string(result.error());
  INFO(text);
  CHECK(text.find("m.yaml:3:1: unknown key `devise`, did you mean `device`?") != std::string::npos);
  CHECK(text.find("m.yaml:5:36: provenance `guess` is not known") != std::string::npos);
  CHECK(text.find("m.yaml:6:21: `memory_bandwidth`") != std::string::npos);
  CHECK(text.find("m.yaml:7:15: `peak_flops` of `device` is `3`") != std::string::npos);
  CHECK(text.find("m.yaml:2:8: `nodes` of the machine is `0`") != std::string::npos);
  CHECK(text.find("5 errors. Nothing was run.") != std::string::npos);
  const auto said = [](const std::string& more) {
    const auto machine = parse_machine("id: x\nlocal: true\ncores: 1\ndevice: {memory: 1Gi}\n" + more, "m.yaml");
    return machine.ok() ? std::string() : to_string(machine.error());
  };
  CHECK(said("").empty());
  CHECK(said("calibration: {id: c, points: [null]}\n").find("`calibration.points` has no `kernel`") != std::string::npos);
  CHECK(said("nodes: 2000000\ndevices_per_node: 2000000\n").find("at most 2^30 devices") != std::string::npos);
  CHECK(said("nodes: 1e10\n").find("m.yaml:5:8: `nodes` of the machine is `1e10`") != std::string::npos);
  CHECK(said("inter_bandwidth: nan\n").find("m.yaml:5:18") != std::string::npos);
  const auto point = [&](const std::string& text) { return said("calibration: {id: c, points: [{kernel: k, " + text + "}]}\n"); };
  CHECK(point("shape: [1], seconds: 1").empty());
  for (const char* bad : {"shape: [0], seconds: 1", "shape: [-1], seconds: 1", "shape: [1], seconds: 0", "shape: [1], seconds: nan",
                          "shape: [1], seconds: -1", "shape: [1], seconds: 1, concurrency: 0"}) {
    INFO(bad);
    CHECK(point(bad).find("m.yaml:5:") != std::string::npos);
  }
  CHECK(parse_machine("", "m.yaml").error().message == "the file is empty");
  CHECK_FALSE(parse_machine("[]", "m.yaml").ok());
  CHECK(parse_machine("id: x\nlocal: true\ndevice: {memory: 1Gi}\n", "m.yaml").error().message == "a local machine without cores");
}
