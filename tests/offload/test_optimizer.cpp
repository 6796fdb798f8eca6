// The optimizer on the host: bytes of every space to the replay, as measured and as planned; the same bits as without.
#include <algorithm>
#include <string>

#include "plan/memory.h"
#include "plan/model.h"
#include "strategies/lower.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/train_case.h"
#include "tests/offload/cases.h"
#include "tests/test.h"

namespace shardlab::testing::of_optimizer {
namespace {

using namespace testing;

Case offloaded(Case c, OffloadTo where = OffloadTo::kCpu) {
  c.layout.offload.optimizer = where;
  return c;
}

constexpr OffloadTo kPlaces[] = {OffloadTo::kCpu, OffloadTo::kNvme};

constexpr Ranks kRanks[] = {
    {},
    {.accumulation = 3},
    {.dp = 2, .accumulation = 2},
    {.dp = 3, .zero = 1},
    {.dp = 2, .zero = 1, .accumulation = 2},
    {.dp = 2, .zero = 2, .accumulation = 4},
    {.dp = 2, .zero = 3, .accumulation = 2},
    {.tp = 2, .accumulation = 2},
    {.pp = 2, .schedule = Schedule::k1F1B, .accumulation = 4},
    {.dp = 2, .zero = 1, .tp = 2, .pp = 2, .schedule = Schedule::kAfab, .accumulation = 2},
};

/// Calls `visit` with a case for every family, layout, tie, precision, bucket and overlap.
template <class Visit>
void for_each_case(const Visit& visit) {
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const Ranks& ranks : kRanks)
      for (const bool tied : {false, true})
        for (const char* precision : {"fp32", "bf16", "bf16 gradients"})
          for (const int64_t bucket_bytes : {0, 20000})
            for (const bool overlap : {false, true}) {
              Case c = small_case(family, 4);
              set(c, ranks);
              c.model.tied_embeddings = tied;
              c.train.precision = precision[0] == 'b' ? Precision::kBf16 : Precision::kFp32;
              if (precision == std::string("bf16 gradients")) c.train.accumulate_dtype = "bf16";
              c.layout.bucket_bytes = c.layout.zero == 3 ? 0 : bucket_bytes;  // whose buckets are units
              c.layout.overlap = overlap;
              visit(std::move(c));
            }
}

MemoryPeak peak(const Case& c, Space space) { return memory_peak(plan_of(c), 0)[static_cast<size_t>(space)]; }

}  // namespace

TEST_CASE("the optimizer on the host: the plan's bytes are its replay's in every space") {
  uint64_t number = 0;
  for_each_case([&](Case c) {
    if (number++ % dealt(1, 7) != 0) return;
    for (const OffloadTo where : kPlaces) require_replayed(offloaded(c, where));
    c.layout.recompute = Recompute::kFull;
    c.train.optimizer = Optimizer::kSgd;
    c.layout.offload.activations = OffloadTo::kCpu;
    c.canonical = c.layout.dp != 3;
    for (const OffloadTo where : kPlaces) require_replayed(offloaded(c, where));
  });
}

TEST_CASE("the optimizer on the host: what is measured is what was planned") {
  uint64_t number = 0;
  for_each_case([&](const Case& c) {
    if (number++ % dealt(13, 109) == 0) require_measured_as_planned(offloaded(c, kPlaces[number % 2]));
  });
}

TEST_CASE("the optimizer on the host: the same bits as without") {
  uint64_t number = 0;
  for_each_case([&](Case c) {
    if (number++ % dealt(11, 89) != 0) return;
    c.train.optimizer = number % 3 == 0 ? Optimizer::kSgd : Optimizer::kAdamW;
    c.layout.recompute = number % 4 < 2 ? Recompute::kFull : Recompute::kNone;
    c.canonical = number % 5 == 0 && c.layout.dp != 3;
    Case away = offloaded(c, kPlaces[number % 2]);
    if (number % 7 == 0) away.layout.offload.activations = OffloadTo::kCpu;
    require_same_bits(c, away);
  });
}

/// What reads every gradient before, or beside, the first update.
struct Judge {
  const char* name;
  void (*set)(Case&);
};
constexpr Judge kJudges[] = {
    {"grad_norm", [](Case& c) { c.train.grad_norm = true; }},
    {"clip_norm", [](Case& c) { c.train.clip_norm = 0.05f; }},
    {"clip_norm, 16-bit gradients",
     [](Case& c) { c.train.clip_norm = 0.05f, c.train.precision = Precision::kBf16, c.train.accumulate_dtype = "bf16"; }},
    {"fp16, scaled", [](Case& c) { c.train.precision = Precision::kFp16, c.train.loss_scale_start = 1024; }},
    {"fp16, scaled and clipped",
     [](Case& c) {
       c.train.precision = Precision::kFp16, c.train.accumulate_dtype = "fp16", c.train.loss_scale = 512, c.train.clip_norm = 0.05f;
     }},
    {"guard",
     [](Case& c) {
       c.train.guard = {.nonfinite = GuardAction::kSkip, .spike = GuardAction::kSkip, .norm_factor = 1000, .window = 2};
     }},
};

TEST_CASE("gradients judged on the host: the plan's bytes are its replay's in every space") {
  uint64_t number = 0;
  for_each_case([&](const Case& plain) {
    if (plain.train.precision != Precision::kFp32) return;
    for (const Judge& judge : kJudges) {
      Case c = offloaded(plain, kPlaces[number++ % 2]);
      if (number % dealt(1, 7) != 0) continue;
      judge.set(c);
      INFO(judge.name);
      require_replayed(c);
    }
  });
}

TEST_CASE("gradients judged on the host: the same bits and the same norm as without") {
  uint64_t number = 0;
  for_each_case([&](const Case& plain) {
    if (plain.train.precision != Precision::kFp32 || number++ % dealt(5, 43) != 0) return;
    const Judge& judge = kJudges[static_cast<size_t>(number / 5) % std::size(kJudges)];
    Case c = plain;
    judge.set(c);
    c.train.grad_norm = true;
    INFO(judge.name);
    require_same_bits(c, offloaded(c, kPlaces[number / 10 % 2]));
    if (number % 3 == 0) require_measured_as_planned(offloaded(c, kPlaces[number / 10 % 2]));
  });
}

TEST_CASE("clipping on the host changes the training, and by the same factor under every sharding") {
  Case c = small_case(Family::kGpt, 3);
  c.train.optimizer = Optimizer::kSgd;
  c.train.learning_rate.peak = 1;
  c.train.grad_norm = c.canonical = true;
  c.train.micro_batch = 4;
  Case clipped = c;
  clipped.train.clip_norm = 0.05f;
  const RandomText text(c.model.vocab);
  const auto free = train_case(offloaded(c), text, 3), bound = train_case(offloaded(clipped), text, 3);
  REQUIRE((free.ok() && bound.ok()));
  CHECK(free->squared_norms.front() > 4 * 0.05 * 0.05);  // there is something to clip
  CHECK(bound->squared_norms.front() == free->squared_norms.front());
  CHECK(bound->losses.back() != free->losses.back());
  clipped.train.micro_batch = 2;
  for (const int zero : {0, 1, 2, 3})
    for (const OffloadTo where : kPlaces) {
      Case sharded = offloaded(clipped, where);
      set(sharded, {.dp = 2, .zero = zero});
      const auto other = train_case(sharded, text, 3);
      REQUIRE(other.ok());
      CHECK(other->losses == bound->losses);
      CHECK(other->parameters == bound->parameters);
    }
}

TEST_CASE("without overlap the device's memory is no larger, and states are the host's either way") {
  for (const bool overlap : {false, true}) {
    Case c = offloaded(small_case(Family::kGpt, 8));
    c.layout.overlap = overlap;
    const MemoryPeak device = peak(c, Space::kDevice), host = peak(c, Space::kHost);
    const auto of = [](const MemoryPeak& p, BufferClass cls) { return p.peak_by_class.bytes[static_cast<size_t>(cls)]; };
    const int64_t copies = of(host, BufferClass::kMaster);
    CHECK(copies >= 4 * parameter_count(c.model));
    CHECK(of(host, BufferClass::kMoment) == 2 * copies);
    CHECK(of(host, BufferClass::kGradient) == copies);
    CHECK(of(device, BufferClass::kMaster) + of(device, BufferClass::kMoment) == 0);
    CHECK(of(device, BufferClass::kGradient) < copies / 2);  // two or three of eight layers
  }
}

}  // namespace shardlab::testing::of_optimizer
