// Answers of the memory calculator: items that add up, moments, intervals and verdicts.
#include "simulator/estimator/memory/answer.h"

#include <fmt/format.h>

#include <algorithm>

#include "simulator/estimator/memory/replay.h"
#include "tests/analytic/studies.h"
#include "tests/test.h"

namespace shardlab::simulator::whatif {
namespace {

using analytic::Estimator;
using analytic::MemoryPart;
using analytic::Point;
using analytic::Schedule;
using analytic::testing::gpt_175b;
using analytic::testing::llama_8b;
using analytic::testing::mixtral_8x7b;
using analytic::testing::study;

Answer answer_of(const analytic::ModelShape& shape, const char* profile, int nodes, const Point& point,
                 int64_t capacity = 80'000'000'000) {
  const analytic::Prepared prepared = study(shape, profile, nodes);
  Estimator estimator(prepared);
  return analytic_answer(prepared, estimator, point, capacity);
}

TEST_CASE("items add up to what the estimate says of each stage") {
  const Point layouts[] = {
      {.dp = 8, .tp = 8, .pp = 8, .zero = 1, .schedule = Schedule::k1F1B, .sequence_parallel = true, .grad_accumulation = 16},
      {.dp = 64, .zero = 3, .micro_batch = 2},
      {.dp = 8,
       .tp = 4,
       .pp = 2,
       .zero = 1,
       .schedule = Schedule::k1F1B,
       .recompute = {analytic::Recompute::kLayer},
       .grad_accumulation = 4},
      {.dp = 64, .zero = 1, .offload_activations = analytic::Medium::kCpu, .offload_optimizer = analytic::Medium::kCpu}};
  for (const char* profile : {"megatron", "torchtitan", "deepspeed", "llm.c"})
    for (const analytic::ModelShape& shape : {gpt_175b(), llama_8b(), mixtral_8x7b()})
      for (const Point& point : layouts) {
        const analytic::Prepared prepared = study(shape, profile, 64);
        Estimator estimator(prepared);
        if (!estimator(point).legal()) continue;
        const Answer answer = analytic_answer(prepared, estimator, point, 0);
        REQUIRE(answer.stages.size() == static_cast<size_t>(point.pp));
        for (const StageAnswer& stage : answer.stages) {
          const analytic::MemoryBytes m = estimator.stage_memory(point, stage.stage);
          INFO(profile << " stage " << stage.stage);
          CHECK(stage.live() == m.live());
          CHECK(stage.of(ItemGroup::kActivations) == m[MemoryPart::kActivations] + m[MemoryPart::kLogits]);
          CHECK(stage.of(ItemGroup::kOptimizer) == m[MemoryPart::kMaster] + m[MemoryPart::kMoments]);
          CHECK(stage.device() - stage.reserved() == m[MemoryPart::kContext] + m[MemoryPart::kNccl]);
          CHECK(stage.reserved() >= stage.live());
          CHECK_FALSE(stage.moment.empty());
          CHECK_FALSE(stage.op.empty());
          CHECK(std::ranges::all_of(stage.items, [](const Item& i) { return i.bytes > 0 && !i.name.empty(); }));
        }
        CHECK(answer.step_s > 0);
        CHECK(answer.verdict() == Verdict::kUnknown);
        CHECK(answer.fits());
      }
}

TEST_CASE("the moment of the peak is where the bytes are") {
  // A vocabulary of 128k and long sequences: the loss. No logits to speak of, deep and in flight: backward of the first stage.
  const Answer loss =
      answer_of(llama_8b(), "torchtitan", 1, {.dp = 8, .zero = 3, .recompute = {analytic::Recompute::kLayer}, .seq_len = 32768});
  CHECK(loss.worst().moment == "the loss");
  const Answer deep = answer_of(gpt_175b(), "megatron", 64,
                                {.dp = 8, .tp = 8, .pp = 8, .zero = 1, .schedule = Schedule::k1F1B, .grad_accumulation = 16});
  CHECK(deep.worst().stage == 0);
  CHECK(deep.worst().moment == "the backward of the last layer with 8 micro-batches in flight");
  CHECK(deep.stages[7].moment.find("in flight") == std::string::npos);
}

TEST_CASE("verdicts follow the interval") {
  Answer answer;
  StageAnswer stage;
  stage.add(ItemGroup::kParameters, "parameters", 60);
  stage.add(ItemGroup::kReserved, "cached", 40);
  stage.add(ItemGroup::kDevice, "context", 10);
  stage.add(ItemGroup::kDevice, "nothing", 0);
  answer.stages.push_back(stage);
  CHECK(stage.items.size() == 3);
  CHECK(stage.live() == 60);
  CHECK(stage.reserved() == 100);
  CHECK(stage.device() == 110);
  answer.live_error = 0.5, answer.reserved_error = 0.2;
  CHECK(answer.live().low == 30);
  CHECK(answer.live().high == 90);
  CHECK(answer.device().low == 90);
  CHECK(answer.device().high == 130);
  const auto verdict = [&](int64_t capacity) { return answer.capacity = capacity, answer.verdict(); };
  CHECK(verdict(0) == Verdict::kUnknown);
  CHECK(verdict(130) == Verdict::kFits);
  CHECK(verdict(129) == Verdict::kTight);
  CHECK(verdict(110) == Verdict::kTight);
  CHECK(verdict(109) == Verdict::kUnlikely);
  CHECK(verdict(90) == Verdict::kUnlikely);
  CHECK(verdict(89) == Verdict::kNo);
  CHECK(answer.headroom() == -21);
  answer.reserved_error = 1e30;  // sums do not overflow
  CHECK(answer.device().high > 0);
}

TEST_CASE("differences name every item of either answer") {
  const Point now{.dp = 8, .micro_batch = 1}, then{.dp = 8, .zero = 3, .micro_batch = 1};
  const Answer a = answer_of(llama_8b(), "megatron", 1, now), b = answer_of(llama_8b(), "megatron", 1, then);
  int64_t before = 0, after = 0;
  bool gathered = false;
  for (const Difference& d : differences(a, b)) {
    before += d.before, after += d.after;
    gathered = gathered || (d.name == "gathered weights and gradients" && d.after > d.before);
  }
  CHECK(before == a.worst().device());
  CHECK(after == b.worst().device());
  CHECK(gathered);
}

TEST_CASE("a layout runs that at ease would hold more than its device has") {
  // The allocator gives back what it only caches before it fails.
  const auto prepared = study(llama_8b(), "llm-foundry", 1);
  const Point point{.dp = 8, .zero = 3, .micro_batch = 8, .grad_accumulation = 2, .seq_len = 2048};
  const analytic::MemoryBytes memory = Estimator(prepared).stage_memory(point, 0);
  const int64_t at_ease = fragmented_bytes(prepared, point, 0, 0);
  REQUIRE(at_ease > 0);
  const int64_t beside = memory[MemoryPart::kContext] + memory[MemoryPart::kNccl], needed = memory.live() + beside;
  const int64_t tight = needed + at_ease / 2;
  CHECK(needed + fragmented_bytes(prepared, point, 0, tight) <= tight);
  // Nothing that can be given back makes room for what is live.
  CHECK(needed + fragmented_bytes(prepared, point, 0, needed - (int64_t{1} << 30)) > needed - (int64_t{1} << 30));
}

TEST_CASE("differences of two answers: what saves most first, what costs most last, equals as they come") {
  const auto answer = [](std::vector<std::pair<const char*, int64_t>> items) {
    Answer a;
    StageAnswer& stage = a.stages.emplace_back();
    for (const auto& [name, bytes] : items) stage.add(ItemGroup::kParameters, name, bytes);
    return a;
  };
  const Answer before = answer({{"stays", 5}, {"grows", 20}, {"shrinks", 10}, {"goes", 6}});
  const Answer after = answer({{"comes", 7}, {"grows", 21}, {"shrinks", 4}, {"stays", 5}});
  std::string told;
  for (const Difference& d : differences(before, after)) told += fmt::format("{} {} {}\n", d.name, d.before, d.after);
  CHECK(told == "shrinks 10 4\ngoes 6 0\nstays 5 5\ngrows 20 21\ncomes 0 7\n");
}

}  // namespace
}  // namespace shardlab::simulator::whatif
