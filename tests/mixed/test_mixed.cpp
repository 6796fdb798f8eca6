// Machines of several kinds of devices, by figures that are counted by hand: which kind a stage lies on, what its ops take there, what a step
// then takes, which layers the stage gets, and the memory that it may use.
#include <fmt/format.h>

#include <memory>
#include <numeric>

#include "answers/planned.h"
#include "plan/kinds.h"
#include "plan/pipeline_case.h"
#include "plan/stage_memory.h"
#include "plan/trace.h"
#include "simulator/estimator/analytic/analytic.h"
#include "simulator/estimator/analytic/profile.h"
#include "simulator/interpreter/case_plan.h"
#include "simulator/interpreter/mixed_costs.h"
#include "simulator/interpreter/pipeline_choice.h"
#include "simulator/interpreter/predict.h"
#include "simulator/interpreter/segments/segments.h"
#include "simulator/interpreter/timeline.h"
#include "sweeps/document.h"
#include "sweeps/machines.h"
#include "sweeps/sweep.h"
#include "tests/namespaces.h"
#include "tests/simulator/plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using simulator::balanced_layers;
using simulator::MixedCostModel;
using simulator::UnitSeconds;

Machine parsed(const std::string& yaml) {
  const auto machine = parse_machine(yaml, "mixed.yaml");
  INFO((machine.ok() ? std::string() : to_string(machine.error())));
  REQUIRE(machine.ok());
  return *machine;
}

/// A kind of device in one line of YAML: `peak` flop/s and as many bytes/s of memory.
std::string kind(const std::string& id, int nodes, int devices, double peak, int64_t memory) {
  return fmt::format(
      "  - {{id: {0}, nodes: {1}, devices_per_node: {2}, inter_bandwidth: 50e9, device: {{id: {0}-device, memory: {4}, "
      "memory_bandwidth: {3}, link_bandwidth: 4e11, peak_flops: {{bf16: {3}, fp32: {3}}}}}}}\n",
      id, nodes, devices, peak, memory);
}

Machine two_kinds(double first = 1e12, double second = 2e12, int devices = 1, int64_t memory = 8'000'000'000,
                  int64_t second_memory = 8'000'000'000, double between = 25e9) {
  return parsed(fmt::format("id: both\ninter_bandwidth: {}\nkinds:\n", between) + kind("slow", 1, devices, first, memory) +
                kind("fast", 1, devices, second, second_memory));
}

/// A model of 12 layers whose head is as long as nothing: a vocabulary of 64 beside 1024 wide layers.
Case twelve_layers(Machine machine, int pp) {
  Case c;
  c.name = "twelve";
  c.machine = std::move(machine);
  c.model = {.name = "twelve", .layers = 12, .hidden = 1024, .heads = 16, .kv_heads = 16, .head_dim = 64, .ffn = 4096, .vocab = 64};
  c.model.max_positions = 512;
  c.layout.pp = pp;
  c.layout.schedule = pp > 1 ? Schedule::k1F1B : Schedule::kNone;
  c.train.seq_len = 512, c.train.micro_batch = 1, c.train.grad_accumulation = 8;
  c.train.precision = Precision::kBf16;
  return c;
}

Case decided_case(const Case& c) {
  const auto decided = answers::decide(c, {});
  INFO((decided.ok() ? std::string() : to_string(decided.error())));
  REQUIRE(decided.ok());
  return *decided;
}

/// Kinds whose ops take the seconds stated, and a hop between them of a quarter of a second.
MixedCostModel by_hand(const Machine& machine, double first, double second, double hop) {
  const auto fixed = [](double forward, double backward, double other) {
    auto model = std::make_unique<FixedCostModel>();
    model->seconds = {{"F", forward}, {"B", backward}};
    model->otherwise = other;
    return model;
  };
  std::vector<std::unique_ptr<PlacedCostModel>> kinds;
  kinds.push_back(fixed(first, 2 * first, 1000)), kinds.push_back(fixed(second, 2 * second, 1000));
  return MixedCostModel(machine, std::move(kinds), fixed(1000, 1000, hop));
}

}  // namespace

TEST_CASE("a mixed machine has the nodes of its kinds, and of each rate what every device has") {
  const Machine m = two_kinds(1e12, 2e12, 4, 8'000'000'000, 5'000'000'000);
  REQUIRE(m.is_mixed());
  CHECK(m.nodes == 2);
  CHECK(m.devices_per_node == 4);
  CHECK(m.devices() == 8);
  CHECK(m.inter_bytes_per_s == 25e9);
  CHECK(m.device.id == "slow-device + fast-device");
  CHECK(m.device.memory_bytes == 5'000'000'000);
  CHECK(m.device.memory_bytes_per_s == 1e12);
  CHECK(m.device.peak_flops.at("bf16") == 1e12);
  CHECK(m.kinds[1].device.peak_flops.at("bf16") == 2e12);
}

TEST_CASE("a precision that one kind lacks is none of the machine's") {
  const Machine m = parsed("id: both\ninter_bandwidth: 1e9\nkinds: [{machine: h100}, {machine: a100, nodes: 2}]\n");
  CHECK(m.kinds[0].device.peak_flops.contains("fp8"));
  CHECK_FALSE(m.device.peak_flops.contains("fp8"));
  CHECK(m.nodes == 3);
  CHECK(m.devices() == 24);
}

TEST_CASE("a stage lies on the kinds of its ranks, and may use the memory of the smallest") {
  const Machine m = parsed("id: both\ninter_bandwidth: 25e9\nkinds:\n" + kind("a", 2, 4, 1e12, 3000) + kind("b", 1, 4, 1e12, 1000) +
                           kind("c", 1, 4, 1e12, 2000));
  Case c = twelve_layers(m, 4);
  c.layout.dp = 4;  // 16 ranks: a stage a node
  const auto on = [&](int stage) { return kinds_of_stage(c, stage); };
  CHECK((on(0) == KindRange{0, 0} && on(1) == KindRange{0, 0} && on(2) == KindRange{1, 1} && on(3) == KindRange{2, 2}));
  CHECK(device_of_stage(c, 2) == "b-device");
  CHECK(memory_of_stage(c, 3) == 2000);
  c.layout.pp = 2, c.layout.dp = 8;
  CHECK((on(0) == KindRange{0, 0} && on(1) == KindRange{1, 2}));
  CHECK(device_of_stage(c, 1) == "b-device + c-device");
  CHECK(memory_of_stage(c, 1) == 1000);
  CHECK(memory_per_rank(c) == 1000);
}

TEST_CASE("a step of two stages of unlike speed is that which is counted by hand") {
  // Two micro-batches, 1F1B. The first stage takes 2 forward and 4 backward, the second 1 and 2, a message 1/4:
  //
  //   stage 0   F0 0..2   F1 2..4                       B0 5.5..9.5            B1 9.5..13.5
  //   stage 1             F0 2.25..3.25  B0 3.25..5.25  F1 5.25..6.25  B1 6.25..8.25
  const Expanded e = pipeline(2, 2, true);
  const Machine m = two_kinds();
  const MixedCostModel costs = by_hand(m, 2, 1, 0.25);
  const Trace trace = simulate(*e.plan, e.programs, m, costs);
  CHECK(step_seconds(trace) == 13.5);
  simulator::SegmentTimeline segments(*e.plan, e.programs, simulator::compute_on(m));
  CHECK(segments.step(m, costs).seconds == 13.5);
  // The other way round the first stage waits for nobody but the messages: F0 0..1 F1 1..2, the second F0 1.25..3.25 B0 3.25..7.25
  // F1 7.25..9.25 B1 9.25..13.25, the first then B1 13.5..15.5.
  const MixedCostModel turned = by_hand(m, 1, 2, 0.25);
  CHECK(step_seconds(simulate(*e.plan, e.programs, m, turned)) == 15.5);
  CHECK(segments.step(m, turned).seconds == 15.5);
}

TEST_CASE("replicas on unlike devices take the step of the slowest") {
  const Expanded e = expanded(kOverlap);  // two data-parallel ranks of one stage: a, then b beside the reduction, then c
  const Machine m = two_kinds();
  std::vector<std::unique_ptr<PlacedCostModel>> kinds;
  for (const double speed : {1.0, 2.0}) {
    auto model = std::make_unique<FixedCostModel>();
    model->seconds = {{"a", 4 / speed}, {"b", 8 / speed}, {"c", 2 / speed}};
    kinds.push_back(std::move(model));
  }
  auto between = std::make_unique<FixedCostModel>();
  between->otherwise = 3;
  const MixedCostModel costs(m, std::move(kinds), std::move(between));
  CHECK(step_seconds(simulate(*e.plan, e.programs, m, costs)) == 4 + 8 + 2);
}

TEST_CASE("a mixed machine of one kind is that machine, to the bit") {
  for (const int pp : {1, 2, 4})
    for (const int tp : {1, 2}) {
      Machine mixed = two_kinds(5e13, 5e13, 4, 80'000'000'000, 80'000'000'000, 50e9);
      Machine plain = mixed.kinds[0];
      plain.nodes = 2;
      Case c = twelve_layers(plain, pp);
      c.layout.tp = tp, c.layout.dp = 8 / (pp * tp);
      INFO("pp " << pp << " tp " << tp);
      Case d = c;
      d.machine = mixed;
      const auto plan = simulator::CasePlan::of(c, answers::lower_unverified),
                 other = simulator::CasePlan::of(d, answers::lower_unverified);
      REQUIRE((plan.ok() && other.ok()));
      const auto costs = cost_model_for(c), both = cost_model_for(d);
      REQUIRE((costs.ok() && both.ok()));
      CHECK((*both)->differs_by_stage());
      CHECK(plan->predict(c, **costs).step_s == other->predict(d, **both).step_s);
      const auto placed = answers::prepare(c), placed_there = answers::prepare(d);
      REQUIRE((placed.ok() && placed_there.ok()));
      CHECK(step_seconds(simulate(*placed->plan, placed->programs, plain, **costs)) ==
            step_seconds(simulate(*placed_there->plan, placed_there->programs, mixed, **both)));
    }
}

TEST_CASE("stages of speed 1 and 2 get layers 1 to 2") {
  const auto units = [](double layer) { return UnitSeconds{{}, {layer / 4, layer / 2, layer / 4}, {}, 0}; };
  CHECK(balanced_layers(12, {units(2), units(1)}) == std::vector{4, 8});
  CHECK(balanced_layers(12, {units(1), units(2)}) == std::vector{8, 4});
  CHECK(balanced_layers(30, {units(1), units(2), units(1)}) == std::vector{12, 6, 12});
  CHECK(balanced_layers(12, {units(2), units(1)}, {12, 6}) == std::vector{6, 6});  // no room for more
  const SlotCosts costs = slot_costs({4, 8}, std::vector{units(2), units(1)});
  CHECK((costs.forward[0] == 2 && costs.forward[1] == 2 && costs.input[0] == 4 && costs.weight[1] == 2));
}

TEST_CASE("layers go to stages by the time that they take on the stage's device") {
  Case c = twelve_layers(two_kinds(1e12, 2e12), 2);
  c.layout.stage_layers = kBalanced;
  CHECK(decided_case(c).layout.stage_layers == "4,8");
  c.machine = two_kinds(2e12, 1e12);
  CHECK(decided_case(c).layout.stage_layers == "8,4");
  c.machine = two_kinds(1e12, 1e12);
  CHECK(decided_case(c).layout.stage_layers == "6,6");
}

TEST_CASE("a stage gives up the layers for which its own device has no room") {
  const int64_t ample = 80'000'000'000;
  Case c = twelve_layers(two_kinds(1e12, 2e12, 1, ample, ample), 2);
  c.layout.stage_layers = "7,5";
  const auto peaks = [&](const Case& of) {
    const auto plan = simulator::CasePlan::of(of, answers::lower_unverified);
    REQUIRE(plan.ok());
    std::vector<int64_t> bytes;
    for (const auto& stage : plan->stages()) bytes.push_back(stage[static_cast<size_t>(Space::kDevice)].peak_bytes);
    return bytes;
  };
  const auto context = static_cast<int64_t>(simulator::analytic::profile_named("shardlab")->memory.context);
  const int64_t room = peaks(c)[1] + context;  // of the fast stage: five layers, and a driver
  c.layout.stage_layers = kBalanced;
  c.machine = two_kinds(1e12, 2e12, 1, ample, room);
  CHECK(decided_case(c).layout.stage_layers == "7,5");
  c.machine = two_kinds(1e12, 2e12, 1, ample, room - 1);
  CHECK(decided_case(c).layout.stage_layers == "8,4");
  // Where all stages are full, layers stay where they take least, and the case does not fit.
  c.machine = two_kinds(1e12, 2e12, 1, room, room);
  const Case full = decided_case(c);
  CHECK(full.layout.stage_layers == "4,8");
  const auto placed = answers::prepare(full);
  REQUIRE(placed.ok());
  const auto fits = answers::fits(full, *placed);
  REQUIRE_FALSE(fits.ok());
  CHECK(fits.error().message.find("a rank of stage 1 needs") != std::string::npos);
  CHECK(fits.error().message.find("of fast-device") != std::string::npos);
}

TEST_CASE("the memory of each stage is held against its own device") {
  Case c = twelve_layers(two_kinds(1e12, 2e12, 1, 9'000'000'000, 7'000'000'000), 2);
  c.layout.stage_layers = "4,8";
  const auto placed = answers::prepare(c);
  REQUIRE(placed.ok());
  const std::vector<StageNeed> stages = answers::stage_memory(c, *placed);
  REQUIRE(stages.size() == 2);
  for (int stage = 0; stage < 2; ++stage) {
    const StageNeed& s = stages[static_cast<size_t>(stage)];
    const auto device = static_cast<size_t>(Space::kDevice);
    CHECK(s.device == (stage == 0 ? "slow-device" : "fast-device"));
    CHECK(s.layers == (stage == 0 ? 4 : 8));
    CHECK(s.peak_bytes == memory_peak(*placed->plan, stage)[device].peak_bytes);
    CHECK(s.arena_bytes == placed->arenas[static_cast<size_t>(stage)].bytes[device]);
    CHECK(s.capacity_bytes == (stage == 0 ? 9'000'000'000 : 7'000'000'000));
    CHECK(s.fits());
  }
  // The larger stage fits the larger device, and not the smaller: one number for the machine would get one of both wrong.
  const int64_t small = stages[0].arena_bytes, large = stages[1].arena_bytes;
  REQUIRE(small < large);
  c.machine = two_kinds(1e12, 2e12, 1, small, large);
  CHECK(answers::fits(c, *placed).ok());
  c.machine = two_kinds(1e12, 2e12, 1, large, small);
  CHECK_FALSE(answers::fits(c, *placed).ok());
  const auto lacking = stage_that_lacks(answers::stage_memory(c, *placed));
  CHECK(lacking == 1);
}

TEST_CASE("schedule auto deals layers by each stage's device") {
  Case c = twelve_layers(two_kinds(1e12, 2e12), 2);
  c.layout.schedule = Schedule::kAuto;
  const Case chosen = decided_case(c);
  const std::vector<int> first = first_layers(chosen);
  const PipelineSchedule schedule = schedule_of(chosen);
  int slow = 0;
  for (const int part : schedule.parts_of(0)) slow += first[static_cast<size_t>(part) + 1] - first[static_cast<size_t>(part)];
  CHECK(slow == 4);
}

TEST_CASE("a mixed machine is written into a case and read back") {
  const Case c =
      twelve_layers(parsed("id: both\ninter_bandwidth: {value: 25e9, provenance: measured}\nkinds: [{machine: h100}, {machine: "
                           "a100, nodes: 2}]\n"),
                    2);
  const std::string text = machine_yaml(c.machine);
  const auto load = [&](const std::string& machine) {
    return load_sweep_text(
        "version: 1\nname: s\nmode: simulate\nmodel: {inline: {family: gpt, layers: 12, hidden: 64, heads: 4, vocab: 64, "
        "max_positions: 64}}\ntrain: {seq_len: 64}\nlayout: {pp: 2, dp: 12}\n" +
            machine,
        "s.yaml");
  };
  const auto sweep = load(text);
  INFO((sweep.ok() ? std::string() : to_string(sweep.error())));
  REQUIRE(sweep.ok());
  const auto points = expand(*sweep);
  REQUIRE(points.ok());
  REQUIRE(points->points.size() == 1);
  const Machine& back = points->points.front().config.machine;
  CHECK(machine_yaml(back) == text);
  REQUIRE(back.kinds.size() == 2);
  CHECK(back.kinds[1].device.constants == c.machine.kinds[1].device.constants);
  CHECK(back.device.provenance.at("inter_bandwidth") == Provenance::kMeasured);
}

TEST_CASE("what a mixed machine cannot be is refused") {
  const auto refused = [](const std::string& yaml) {
    const auto machine = parse_machine(yaml, "m.yaml");
    REQUIRE_FALSE(machine.ok());
    return to_string(machine.error());
  };
  const auto contains = [](const std::string& text, const std::string& words) {
    INFO(text);
    CHECK(text.find(words) != std::string::npos);
  };
  const std::string head = "id: both\ninter_bandwidth: 1e9\n";
  contains(refused(head + "kinds: [{machine: h100}]\n"), "two kinds or more");
  contains(refused("id: both\nkinds: [{machine: h100}, {machine: a100}]\n"), "has no `inter_bandwidth`");
  contains(refused(head + "nodes: 4\nkinds: [{machine: h100}, {machine: a100}]\n"),
           "a machine with `kinds` has `nodes` of its own");
  contains(refused(head + "kinds: [{machine: h100}, {machine: gh200}]\n"), "devices a node");
  contains(refused(head + "kinds: [{machine: h100}, {machine: a101}]\n"), "a101");
  // What the kinds say is not said again beside them.
  Case c = twelve_layers(two_kinds(), 2);
  c.machine.nodes = 4;
  contains(to_string(check(c).error()), "whose kinds say them");
  c = twelve_layers(two_kinds(), 2);
  c.layout.stage_layers = kMeasured, c.checkpoint.resume = "somewhere";
  contains(to_string(check(c).error()), "layers were timed on one kind of device");
  // Estimates of frameworks know one kind.
  const auto prepared = simulator::analytic::prepare(twelve_layers(two_kinds(), 2));
  REQUIRE_FALSE(prepared.ok());
  contains(to_string(prepared.error()), "of several kinds of devices, and estimates know one");
}

}  // namespace shardlab::testing
