// What the profiles say of each framework's memory, as sums that can be done by hand.
#include <algorithm>
#include <array>
#include <map>

#include "tests/analytic/studies.h"
#include "tests/test.h"

namespace shardlab::simulator::analytic {
namespace {

using testing::gpt_175b;
using testing::llama_8b;
using testing::study;

constexpr int64_t kParameters8b = 8'030'261'248;

/// The largest running sum of a stage's events, of all streams together and of each.
struct Peaks {
  int64_t all = 0;
  std::map<int, int64_t> streams;
};
Peaks peaks_of(const Prepared& prepared, const Point& point, int32_t stage) {
  Peaks peaks;
  int64_t live = 0;
  std::map<int, int64_t> by_stream;
  std::map<int32_t, int64_t> tensors;
  for (const AllocationEvent& e : allocation_events(prepared, point, stage)) {
    live += e.bytes, peaks.all = std::max(peaks.all, live);
    const int64_t own = by_stream[e.stream] += e.bytes;
    peaks.streams[e.stream] = std::max(peaks.streams[e.stream], own);
    tensors[e.tensor] += e.bytes;
    REQUIRE(tensors[e.tensor] >= 0);  // nothing is given back that is not there
  }
  return peaks;
}

struct Run {
  const char* profile;
  Point point;
  const char* recompute = "none";
};

const std::array kRuns{
    Run{"torchtitan", {.dp = 8, .zero = 3, .micro_batch = 2, .seq_len = 8192}, "selective"},
    Run{"torchtitan", {.dp = 8, .zero = 3, .micro_batch = 1, .grad_accumulation = 4, .seq_len = 8192}, "full"},
    Run{"torchtitan-compiled", {.dp = 8, .zero = 3, .micro_batch = 2, .seq_len = 8192}, "selective"},
    Run{"torchtitan-2025-compiled", {.dp = 8, .zero = 3, .micro_batch = 2, .seq_len = 8192}, "selective"},
    Run{"torchtitan", {.dp = 4, .tp = 2, .zero = 3, .sequence_parallel = true, .micro_batch = 2, .seq_len = 8192}, "full"},
    Run{"llm-foundry", {.dp = 8, .zero = 3, .micro_batch = 8, .seq_len = 2048}},
    Run{"llm-foundry", {.dp = 8, .zero = 3, .micro_batch = 8, .grad_accumulation = 4, .seq_len = 2048}, "full"},
    Run{"deepspeed", {.dp = 8, .zero = 3, .micro_batch = 4, .seq_len = 2048}, "full"},
    Run{"deepspeed", {.dp = 8, .zero = 2, .micro_batch = 4, .grad_accumulation = 2, .seq_len = 2048}, "full"},
    Run{"nanotron", {.dp = 2, .tp = 4, .zero = 0, .micro_batch = 4, .grad_accumulation = 4, .seq_len = 4096}},
    Run{"nanotron",
        {.dp = 2, .tp = 4, .zero = 1, .sequence_parallel = true, .micro_batch = 4, .grad_accumulation = 4, .seq_len = 4096}},
    Run{"nanotron",
        {.dp = 2, .pp = 4, .zero = 1, .schedule = Schedule::kAfab, .micro_batch = 2, .grad_accumulation = 8, .seq_len = 2048}},
    Run{"nanotron",
        {.dp = 1,
         .tp = 2,
         .pp = 4,
         .zero = 0,
         .schedule = Schedule::k1F1B,
         .micro_batch = 2,
         .grad_accumulation = 8,
         .seq_len = 2048},
        "full"},
    Run{"megatron", {.dp = 8, .zero = 1, .micro_batch = 2, .grad_accumulation = 2, .seq_len = 4096}},
    Run{"megatron-2026", {.dp = 2, .tp = 4, .zero = 1, .sequence_parallel = true, .grad_accumulation = 2, .seq_len = 4096}},
};

TEST_CASE("each framework's allocations peak where its estimate says") {
  for (const Run& run : kRuns) {
    const Prepared prepared = study(llama_8b(), run.profile, 1);
    Point point = run.point;
    REQUIRE(read(run.recompute, &point.recompute));
    Estimator estimator(prepared);
    for (int32_t stage = 0; stage < point.pp; ++stage) {
      const auto expected = static_cast<double>(estimator.stage_memory(point, stage).live());
      INFO(run.profile << " zero " << point.zero << " pp " << point.pp << " recompute " << run.recompute << " stage " << stage);
      CHECK(static_cast<double>(peaks_of(prepared, point, stage).all) == Approx(expected).epsilon(0.03));
    }
  }
}

TEST_CASE("FSDP2 gathers and reduces in memory of other streams than compute's") {
  // Cut gradients of 4 bytes are outputs of the reduce-scatters; embedding and head are gathered first, and the first block's
  // weights into a buffer beside theirs.
  const Prepared prepared = study(llama_8b(), "torchtitan", 1);
  const Peaks peaks = peaks_of(prepared, {.dp = 8, .zero = 3, .micro_batch = 1, .seq_len = 4096}, 0);
  CHECK(static_cast<double>(peaks.streams.at(2)) == Approx(4.0 * kParameters8b / 8).epsilon(1e-6));
  const double ends = 2.0 * 128256 * 4096 + 4096, layer = (kParameters8b - ends) / 32;
  CHECK(static_cast<double>(peaks.streams.at(1)) == Approx(2 * (ends + layer)).epsilon(1e-6));
}

TEST_CASE("gradients that each step makes are not there at the first micro-batch's loss") {
  Estimator estimator(study(llama_8b(), "torchtitan", 1));
  Point point{.dp = 8, .zero = 3, .micro_batch = 2, .seq_len = 8192};
  REQUIRE(read("full", &point.recompute));
  CHECK(estimator.stage_peak(point, 0).moment == PeakMoment::kLoss);
  CHECK(estimator.stage_memory(point, 0)[MemoryPart::kGradients] == 0);
  point.grad_accumulation = 2;
  CHECK(estimator.stage_memory(point, 0)[MemoryPart::kGradients] == 4 * kParameters8b / 8);
}

TEST_CASE("nanotron's gradients in 16 bit are those of the whole model when a micro-batch's backward ends") {
  // 64 tokens: activations are nothing beside 2 bytes a parameter. With DDP its buckets are there besides.
  Estimator estimator(study(llama_8b(), "nanotron", 1));
  const Point whole{.dp = 2, .zero = 0, .micro_batch = 1, .grad_accumulation = 2, .seq_len = 64};
  const MemoryBytes m = estimator.stage_memory(whole, 0);
  CHECK(m[MemoryPart::kGradients] == (4 + 2) * kParameters8b);
  CHECK(m[MemoryPart::kBuckets] == 2 * kParameters8b);
  CHECK(estimator.stage_peak(whole, 0).moment == PeakMoment::kEnd);
  // Under ZeRO-1 there is no DDP; updated weights come into two buffers of 2 bytes a parameter.
  Point cut = whole;
  cut.zero = 1;
  const MemoryBytes c = estimator.stage_memory(cut, 0);
  CHECK(estimator.stage_peak(cut, 0).moment == PeakMoment::kUpdate);
  CHECK(c[MemoryPart::kGradients] == 4 * kParameters8b);
  CHECK(c[MemoryPart::kGathered] == 4 * kParameters8b);
  CHECK(c[MemoryPart::kBuckets] == 0);
}

TEST_CASE("nanotron's buffers of gathered rows stay") {
  Estimator estimator(study(llama_8b(), "nanotron", 1));
  Point point{.dp = 2, .tp = 4, .zero = 1, .sequence_parallel = true, .micro_batch = 2, .seq_len = 4096};
  CHECK(estimator.stage_memory(point, 0)[MemoryPart::kBuckets] == 2 * (2LL * 2 * 4096 * 4096));
  point.sequence_parallel = false;
  CHECK(estimator.stage_memory(point, 0)[MemoryPart::kBuckets] == 0);
}

TEST_CASE("all-forward-all-backward keeps the softmax of every micro-batch") {
  Estimator estimator(study(llama_8b(), "nanotron", 1));
  Point point{.pp = 2, .schedule = Schedule::kAfab, .micro_batch = 1, .grad_accumulation = 6, .seq_len = 8192};
  REQUIRE(read("full", &point.recompute));
  // 4 bytes a logit each, and at the loss of the last the fp32 logits besides.
  const int64_t logits = 8192LL * 128256;
  CHECK(estimator.stage_memory(point, 1)[MemoryPart::kLogits] == 4 * logits * (6 + 1));
  point.schedule = Schedule::k1F1B;
  CHECK(estimator.stage_memory(point, 1)[MemoryPart::kLogits] == 4 * logits * 2);
}

TEST_CASE("Transformer Engine's gradients that nobody reads are one for each shape of a layer's matrices") {
  Estimator plain(study(llama_8b(), "megatron", 1)), dummies(study(llama_8b(), "megatron-2026", 1));
  const Point point{.dp = 4, .tp = 2, .zero = 1, .sequence_parallel = true};
  const int64_t shapes = (4096LL * 6144 + 4096LL * 4096 + 3LL * 4096 * 14336) / 2;
  CHECK(dummies.stage_memory(point, 0)[MemoryPart::kWorkspace] - plain.stage_memory(point, 0)[MemoryPart::kWorkspace] ==
        2 * shapes);
}

TEST_CASE("tensors that a pipeline exchanges stay where the framework keeps them") {
  Estimator estimator(study(gpt_175b(), "torchtitan", 8));
  Point point{.dp = 2, .tp = 4, .pp = 8, .zero = 3, .schedule = Schedule::k1F1B, .sequence_parallel = true, .grad_accumulation = 8};
  REQUIRE(read("full", &point.recompute));
  const int64_t boundary = 2LL * 2048 * 12288 / 4;
  // First: outputs and their gradients; between: inputs and theirs too, less those in flight that activations count.
  CHECK(estimator.stage_memory(point, 0)[MemoryPart::kBuckets] == 2 * 8 * boundary);
  CHECK(estimator.stage_memory(point, 3)[MemoryPart::kBuckets] == (4 * 8 - 5) * boundary);
}

}  // namespace
}  // namespace shardlab::simulator::analytic
