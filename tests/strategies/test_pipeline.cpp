// Pipelines lowered: every schedule, with what changes events and buffers, is a plan that verify proves.
#include <algorithm>

#include "plan/memory.h"
#include "plan/pipeline_case.h"
#include "strategies/accumulation.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/schedules.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

const std::vector<Schedule> kPiped = pipeline_schedules();

Case piped(Schedule schedule, int stages, int micro_batches, Family family = Family::kGpt) {
  Case c = with_pipeline(tiny_case(family), stages, schedule, micro_batches);
  c.model.layers = 9;
  if (is_looped(schedule)) c.layout.vpp = 2;
  return c;
}

void lowers(const Case& c) {
  // DualPipe has an even number of stages, and a micro-batch for each direction.
  if (is_mirrored(c.layout.schedule) && (c.layout.pp % 2 != 0 || c.train.grad_accumulation < 2)) return;
  const auto plan = lower(c);
  INFO(name_of(c.layout.schedule) << " pp " << c.layout.pp << " m " << c.train.grad_accumulation << " zero " << c.layout.zero
                                  << " dp " << c.layout.dp << " tp " << c.layout.tp << ": "
                                  << (plan.ok() ? "" : to_string(plan.error())));
  REQUIRE(plan.ok());
}

TEST_CASE("every schedule lowers to a plan that is proven, for any number of micro-batches") {
  for (const Schedule schedule : kPiped)
    for (const int stages : {2, 3, 4})
      for (const int m : {1, 2, stages, 2 * stages + 1})
        lowers(piped(schedule, stages, m, m % 2 == 0 ? Family::kGpt : Family::kLlama));
}

TEST_CASE("every schedule goes with what else a step may do") {
  void (*const changes[])(Case&) = {
      [](Case& c) { c.layout.dp = 2; },
      [](Case& c) { c.layout.dp = 2, c.layout.zero = 1, c.layout.bucket_bytes = 1 << 14; },
      [](Case& c) { c.layout.dp = 2, c.layout.zero = 2; },
      [](Case& c) { c.layout.dp = 2, c.layout.zero = 3; },
      [](Case& c) { c.layout.dp = 2, c.layout.zero = 3, c.layout.fsdp = {.unit = 2, .prefetch = 2, .reshard = false}; },
      [](Case& c) { c.layout.tp = 2; },
      [](Case& c) { c.layout.recompute = Recompute::kFull; },
      [](Case& c) { c.layout.recompute = Recompute::kSelective; },
      [](Case& c) { c.layout.offload.activations = OffloadTo::kCpu; },
      [](Case& c) { c.layout.offload.optimizer = OffloadTo::kCpu; },
      [](Case& c) { c.model.tied_embeddings = true; },
      [](Case& c) { c.model.tied_embeddings = true, c.canonical = true, c.train.grad_accumulation = 4, c.train.micro_batch = 2; },
      [](Case& c) { c.canonical = true, c.train.micro_batch = 2, c.layout.dp = 2, c.train.grad_accumulation = 4; },
      [](Case& c) { c.canonical = true, c.train.micro_batch = 2, c.layout.dp = 2, c.layout.zero = 2, c.train.grad_accumulation = 4; },
      [](Case& c) { c.train.precision = Precision::kBf16; },
      [](Case& c) { c.train.precision = Precision::kFp16; },
      [](Case& c) { c.train.precision = Precision::kFp8; },
      [](Case& c) { c.train.clip_norm = 1; },
      [](Case& c) { c.train.dropout = 0.1f; },
      [](Case& c) { c.train.guard.spike = GuardAction::kSkip; },
      [](Case& c) { c.layout.dp = 2, c.layout.compression.kind = CompressionKind::kInt8; },
  };
  for (const Schedule schedule : kPiped)
    for (const auto change : changes) {
      Case c = piped(schedule, 2, 5);
      change(c);
      if (is_mirrored(schedule) && c.layout.compression.kind != CompressionKind::kNone) {
        REQUIRE(check(c).error().message.starts_with("schedule=dualpipe with compression=int8: "));
        continue;
      }
      lowers(c);
    }
}

TEST_CASE("parts may have any number of layers, the first and the last none") {
  Case c = piped(Schedule::k1F1B, 3, 4);
  c.layout.stage_layers = "0,8,1";
  lowers(c);
  REQUIRE(first_layers(c) == std::vector{0, 0, 8, 9});
  c.layout.stage_layers = "4,5,0";
  lowers(c);
  c = piped(Schedule::kZbV, 2, 4);
  c.layout.stage_layers = "0,4,5,0";
  lowers(c);
  c.layout.stage_layers = "";
  REQUIRE(first_layers(c) == std::vector{0, 3, 5, 7, 9});

  const auto refusal = [&](const char* layers) {
    c.layout.stage_layers = layers;
    return check(c).error().message;
  };
  REQUIRE(refusal("4,5") == "stage_layers=4,5 has 2 numbers for 4 parts");
  REQUIRE(refusal("4,5,1,1") == "stage_layers=4,5,1,1 sums to 11 of 9 layers");
  REQUIRE(refusal("4,0,4,1") == "stage_layers=4,0,4,1: part 1 has no layer");
  REQUIRE(refusal("4;5") == "stage_layers=4;5: no list of numbers");
}

TEST_CASE("layers are dealt by measured time where a run goes on, and its parts are known") {
  Case c = piped(Schedule::k1F1B, 3, 4);
  c.layout.stage_layers = "measured";
  REQUIRE_FALSE(is_pipeline_decided(c));
  REQUIRE(to_string(check(c).error()) ==
          "stage_layers=measured in a run that begins from its seed: nothing has been measured\n"
          "  set checkpoint.resume to a checkpoint of a measured run, or stage_layers: balanced");
  c.checkpoint.resume = "checkpoints";
  REQUIRE(check(c).ok());
  REQUIRE(lower(c).error().message == "stage_layers=measured has not been decided: a plan knows no seconds");
  c.model.layers = 2;
  REQUIRE(check(c).error().message == "pp=3 stages for 2 layers: a stage would be empty");
  c.model.layers = 9, c.layout.schedule = Schedule::kAuto;
  REQUIRE(check(c).error().message == "stage_layers=measured with schedule=auto: the number of parts is not known");
}

TEST_CASE("a table of slots that nobody has seen lowers as it is") {
  Case c = piped(Schedule::kTable, 2, 2);
  // Three parts on two stages, in no order of the known ones; micro-batch 1 before 0.
  c.layout.schedule_table = "0F1,0F0,2F1,2I1,2F0,0I1,2I0,2W0,0I0,0W0,2W1,0W1\n1F1,1F0,1B1,1B0\n";
  lowers(c);
  c.canonical = true;
  lowers(c);
  c.train.grad_accumulation = 3;
  REQUIRE(check(c).error().message == "schedule has 2 micro-batches, but grad_accumulation is 3");
}

TEST_CASE("sums over micro-batches have one tree, in whatever order the micro-batches come") {
  // Each copy as the text of what it holds.
  const auto sum = [](std::vector<int> order, int m) {
    std::vector<std::string> copies(32);
    const auto plan = strategies::carries(order, m, true);
    for (size_t i = 0; i < order.size(); ++i) {
      REQUIRE(copies[static_cast<size_t>(plan[i].written)].empty());
      copies[static_cast<size_t>(plan[i].written)] = std::to_string(order[i]);
      for (const auto& [to, from] : plan[i].added) {
        std::string &a = copies[static_cast<size_t>(to)], &b = copies[static_cast<size_t>(from)];
        REQUIRE_FALSE((a.empty() || b.empty()));
        // A sum of two is the same either way round: written with the lower leaf first.
        const auto leaf = [](const std::string& s) { return std::stoi(s.substr(s.find_first_not_of('('))); };
        a = leaf(a) < leaf(b) ? "(" + a + " " + b + ")" : "(" + b + " " + a + ")";
        b.clear();
      }
    }
    REQUIRE(std::ranges::count_if(copies, [](const std::string& s) { return !s.empty(); }) == 1);
    return copies[0];
  };
  REQUIRE(sum({0, 1, 2, 3}, 4) == "((0 1) (2 3))");
  REQUIRE(sum({0, 1, 2, 3, 4, 5, 6}, 7) == "(((0 1) (2 3)) ((4 5) 6))");
  for (int m = 1; m <= 6; ++m) {
    std::vector<int> order;
    for (int j = 0; j < m; ++j) order.push_back(j);
    const std::string in_order = sum(order, m);
    while (std::ranges::next_permutation(order).found) REQUIRE(sum(order, m) == in_order);
  }
  REQUIRE(sum({4, 5, 6, 7}, 8) == "((4 5) (6 7))");
}

}  // namespace
}  // namespace shardlab::testing
