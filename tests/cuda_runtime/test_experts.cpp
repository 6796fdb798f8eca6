// Experts that ranks share, on GPUs: whole trainings over both transports with the CPU's bits, rows counted, peaks and wire bytes exact; and which
// counts the host reads.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plan/expert_places.h"
#include "runtime/host_counts.h"
#include "strategies/lower.h"
#include "tests/cuda_runtime/rig.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing::of_shared_experts {
namespace {

void require_same(const Run& run, const Run& cpu) {
  REQUIRE(run.losses == cpu.losses);
  REQUIRE(run.norms == cpu.norms);
  for (const auto& [parameter, values] : cpu.parameters) {
    INFO(parameter);
    REQUIRE(same_bits(run.parameters.at(parameter), values));
  }
}

HostCounts counts_of(const Case& config) {
  const PlacedPlan placed = lowered(config);
  const auto counts =
      host_counts(*placed.plan, placed.programs[0], RowCounting(*placed.plan, placed.plan->roles[0], placed.programs[0]));
  REQUIRE(counts.ok());
  return *counts;
}

}  // namespace

TEST_CASE("experts that ranks share: every layout has the CPU's bits on one GPU and over NCCL, and the CPU's rows of experts") {
  uint64_t number = 0;
  int trained = 0;
  std::set<std::string> names;
  for (const auto& [name, subject] : mixtures()) {
    const Run single = train_on_cpu(training_layouts(subject).front().second, {.steps = 3});
    for (const auto& [layout, config] : expert_layouts(subject)) {
      names.insert(layout);
      const bool named = layout.ends_with("placed") || layout.find("slices") != std::string::npos;
      if (number++ % dealt(1, kWatched ? 10 : 4) != 0 && (kWatched || !named)) continue;
      INFO(name << " " << layout);
      const Run cpu = train_on_cpu(config, {.steps = 3});
      REQUIRE(cpu.losses[2] != cpu.losses[0]);
      if (config.layout.cp == 1) REQUIRE(cpu.losses == single.losses);  // which has the tokens in the order of the text
      for (const bool nccl : {false, true}) {
        if (nccl && config.layout.cp_kind == ContextKind::kZigzag) continue;  // halves of a hop, which NCCL takes as one call
        INFO((nccl ? "NCCL" : "one GPU"));
        const Run run = train_on_fake(config, {.steps = 3, .seed = number, .nccl = nccl});
        require_same(run, cpu);
        REQUIRE(run.sent_bytes == cpu.sent_bytes);
        REQUIRE(run.peaks == run.planned);
        REQUIRE(run.experts == cpu.experts);
        REQUIRE(run.experts[0].size() == static_cast<size_t>(subject.model.layers - subject.model.experts.dense_layers));
      }
      ++trained;
    }
  }
  REQUIRE(names.size() == 19);
  REQUIRE(trained >= (thorough() ? 46 : kWatched ? 4 : 18));
}

TEST_CASE("a plan for GPUs has a table of each placed layer's experts and places, and 8 bytes for each of its experts") {
  Case c = mixtures()[0].second;
  c.layout.dp = c.layout.ep = 2, c.train.micro_batch = 4;
  c.train.global_batch_tokens = c.train.seq_len * 8;
  const auto table = [](const PlacedPlan& placed) -> std::optional<Type> {
    const std::vector<Buffer>& buffers = placed.plan->roles[0].buffers;
    const auto found = std::ranges::find(buffers, kExpertPlaces, &Buffer::name);
    return found == buffers.end() ? std::nullopt : std::optional(found->type);
  };
  CHECK(!table(lowered(c)));
  c.layout.expert_placement = "1:3,0,2,1";
  const PlacedPlan placed = lowered(c);
  REQUIRE(table(placed));
  CHECK(table(placed)->bytes() == 8 * 4);
  CHECK(expert_places_at(*placed.plan, placed.plan->roles[0], 1) == 0);
  CHECK(expert_places_at(*placed.plan, placed.plan->roles[0], 0) == std::nullopt);
  c.layout.expert_placement = "0:1,0,3,2 1:3,0,2,1";
  CHECK(table(lowered(c))->bytes() == 2 * 8 * 4);
  c = with_pipeline(c, 2, Schedule::k1F1B, 2);
  c.train.micro_batch = 2;
  const PlacedPlan stages = lowered(c);
  CHECK(table(stages)->bytes() == 8 * 4);  // of the stage's own layer
  CHECK(expert_places_at(*stages.plan, stages.plan->roles[1], 1) == 0);
}

TEST_CASE("a bound on rows of experts on GPUs: steps without room run again in the same arena, with the bits of the worst case") {
  const Case subject = mixtures()[0].second;
  int again = 0;
  for (const bool nccl : {false, true})
    for (const ExpertOverlap overlap : {ExpertOverlap::kNone, ExpertOverlap::kLayer}) {
      Case worst = subject;
      worst.layout.dp = worst.layout.ep = 2, worst.train.grad_accumulation = 2, worst.train.micro_batch = 2;
      worst.train.global_batch_tokens = worst.train.seq_len * 8;
      worst.layout.expert_overlap = overlap;
      const Run cpu = train_on_cpu(worst, {.steps = 4});
      for (const float bound : {1.01f, 1.95f}) {
        Case config = worst;
        config.layout.expert_bound = bound;
        INFO("bound " << bound << " NCCL " << nccl << " overlap " << name_of(overlap));
        const Run run = train_on_fake(config, {.steps = 4, .seed = 5, .nccl = nccl});
        require_same(run, cpu);
        REQUIRE(run.peaks == run.planned);
        REQUIRE(run.skipped == 0);
        double peak = 0;
        for (const auto& rows : cpu.experts) peak = std::max(peak, *imbalance_of(rows).peak);
        if (bound > peak) REQUIRE(run.reruns == 0);
        if (bound < 1.1f) REQUIRE(run.reruns > 0);
        for (size_t step = 0; step < cpu.experts.size(); ++step)
          REQUIRE(imbalance_of(run.experts[step]).by_expert == imbalance_of(cpu.experts[step]).by_expert);
        again += run.reruns;
      }
    }
  REQUIRE(again > 0);
}

TEST_CASE("experts that ranks share on the GPU's own kernels, emulated: the CPU's values in fp32, and losses near them in bf16") {
#ifdef __SANITIZE_THREAD__
  WARN("skipped: the thread sanitizer cannot follow the fibers that the emulation runs kernels on");
  return;
#endif
  int again = 0;
  for (const auto& [name, subject] : mixtures()) {
    INFO(name);
    Case c = subject;
    c.layout.dp = c.layout.ep = 2;
    c.train.seq_len = 8, c.train.micro_batch = 2, c.train.global_batch_tokens = 32;
    if (c.model.experts.drops()) {  // the ranks that share experts share the room of each sequence too
      c.layout.dp = 1, c.layout.tp = 2, c.layout.sequence_parallel = true, c.layout.expert_tp = 1;
      c.train.micro_batch = 1, c.train.grad_accumulation = 2, c.train.global_batch_tokens = 16;
      c.layout.expert_placement = "1:3,0,2,1";
    } else {
      c.layout.expert_bound = 1.01f;
      c.layout.expert_placement = c.model.experts.count == 4 ? "1:3,0,2,1" : "1:6,0,3,1,7,2,4,5";
    }
    const Run run = train_on_fake(c, {.steps = 1, .kernels = Behind::kEmulated}), cpu = train_on_cpu(c, {.steps = 1});
    REQUIRE(run.losses[0] == Approx(cpu.losses[0]).epsilon(1e-5));
    REQUIRE(run.experts == cpu.experts);
    REQUIRE(run.reruns == cpu.reruns);
    again += run.reruns;
    for (const auto& [parameter, values] : run.parameters) {
      INFO(parameter);
      REQUIRE(worst(values, cpu.parameters.at(parameter)) < 2e-5);
    }
    c.train.precision = Precision::kBf16;
    const Run narrow = train_on_fake(c, {.steps = 1, .kernels = Behind::kEmulated, .nccl = true}),
              there = train_on_cpu(c, {.steps = 1});
    REQUIRE(narrow.losses[0] == Approx(there.losses[0]).epsilon(2e-3));
  }
  REQUIRE(again > 0);
}

TEST_CASE("rows of experts are counted on a GPU without ep too, without a wait of the host") {
  for (const auto& [name, subject] : mixtures()) {
    INFO(name);
    Case c = subject;
    c.layout.dp = 2, c.train.micro_batch = 2, c.train.grad_accumulation = 2;
    c.train.global_batch_tokens = c.train.seq_len * 8;
    const HostCounts counts = counts_of(c);
    const auto layers = static_cast<size_t>(c.model.layers - c.model.experts.dense_layers);
    REQUIRE(counts.copies.size() == layers * 2);  // of two micro-batches
    REQUIRE(counts.events == 0);
    const Run cpu = train_on_cpu(c, {.steps = 2}), run = train_on_fake(c, {.steps = 2});
    require_same(run, cpu);
    REQUIRE(run.experts == cpu.experts);
    REQUIRE(run.experts[1].size() == layers);
    REQUIRE(run.most_pending > 50);
  }
}

TEST_CASE("the host reads the counts of a layer and micro-batch once: the way back and backward have them from there") {
  Case c = mixtures()[0].second;
  c.layout.dp = c.layout.ep = 2, c.train.micro_batch = 2, c.train.grad_accumulation = 2;
  c.train.global_batch_tokens = c.train.seq_len * 8;
  constexpr size_t kCalls = 4;  // two layers, two micro-batches
  const auto expect = [&](const Case& config, size_t forwards) {
    INFO(name_of(config.layout.recompute) << " " << name_of(config.layout.expert_overlap));
    const HostCounts counts = counts_of(config);
    // Each forward's: what the router says goes, and what the exchange of counts says comes.
    CHECK(counts.copies.size() == 2 * kCalls * forwards);
    CHECK(counts.events == static_cast<int32_t>(counts.copies.size()));
    // Both of each exchange, of which a forward has two and backward two; and those of one gradient of weights, for the rows of experts.
    CHECK(counts.reads.size() == kCalls * (2 * 2 * (forwards + 1) + 1));
    std::set<int32_t> read;
    for (const CountRead& r : counts.reads) {
      read.insert(r.copy);
      CHECK(counts.copies[static_cast<size_t>(r.copy)].instruction < r.instruction);
    }
    CHECK(read.size() == counts.copies.size());
  };
  expect(c, 1);
  Case other = c;
  other.layout.expert_overlap = ExpertOverlap::kLayer;
  expect(other, 1);
  other = c;
  other.layout.recompute = Recompute::kFull;
  expect(other, 2);
  // Counts that wait in host memory and come back are the same counts.
  other = c;
  other.layout.offload.activations = OffloadTo::kCpu;
  expect(other, 1);
}

TEST_CASE("counts that no single op makes are refused where a device would have to go by them") {
  Case c = mixtures()[0].second;
  c.layout.dp = c.layout.ep = 2, c.train.micro_batch = 4;
  c.train.global_batch_tokens = c.train.seq_len * 8;
  auto plan = lower(c);
  REQUIRE(plan.ok());
  for (Segment& segment : plan->segments)
    std::erase_if(segment.steps, [](const Step& step) {
      const Op* op = std::get_if<Op>(&step);
      return op != nullptr && op->label == "moe.counts";
    });
  const PlacedPlan placed = place(std::move(*plan));
  const auto counts =
      host_counts(*placed.plan, placed.programs[0], RowCounting(*placed.plan, placed.plan->roles[0], placed.programs[0]));
  REQUIRE(!counts.ok());
  CHECK(counts.error().message.ends_with("goes by counts of rows that no single op of the step has made"));
  CHECK(counts.error().message.find("moe.go") != std::string::npos);
}

}  // namespace shardlab::testing::of_shared_experts
