// Activations in host memory: bytes of every space to the replay, as measured and as planned; the same bits as without.
#include <algorithm>
#include <string>

#include "plan/memory.h"
#include "strategies/lower.h"
#include "tests/deal.h"
#include "tests/laws/replay.h"
#include "tests/namespaces.h"
#include "tests/offload/cases.h"
#include "tests/test.h"

namespace shardlab::testing::of_activations {
namespace {

using namespace testing;

Case offloaded(Case c, OffloadTo where = OffloadTo::kCpu) {
  c.layout.offload.activations = where;
  return c;
}

constexpr OffloadTo kPlaces[] = {OffloadTo::kCpu, OffloadTo::kNvme};

constexpr Ranks kRanks[] = {
    {},
    {.accumulation = 3},
    {.dp = 2, .accumulation = 2},
    {.dp = 2, .zero = 1},
    {.dp = 2, .zero = 2, .accumulation = 4},
    {.dp = 2, .zero = 3, .accumulation = 2},
    {.tp = 2},
    {.pp = 2, .schedule = Schedule::k1F1B, .accumulation = 4},
    {.pp = 3, .schedule = Schedule::kAfab, .accumulation = 3},
    {.dp = 2, .zero = 1, .tp = 2, .pp = 2, .schedule = Schedule::k1F1B, .accumulation = 3},
};

int64_t peak(const Case& c, Space space) { return memory_peak(plan_of(c), 0)[static_cast<size_t>(space)].peak_bytes; }

int64_t activations(const Case& c) {
  return memory_peak(plan_of(c), 0)[static_cast<size_t>(Space::kDevice)]
      .at_peak.bytes[static_cast<size_t>(BufferClass::kActivation)];
}

}  // namespace

TEST_CASE("activations on the host: the plan's bytes are its replay's in every space") {
  uint64_t number = 0;
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const Ranks& ranks : kRanks)
      for (const int64_t layers : {3, 5, 8})
        for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull})
          for (const Precision precision : {Precision::kFp32, Precision::kBf16})
            for (const bool overlap : {false, true}) {
              if (number++ % dealt(1, 5) != 0) continue;
              Case c = small_case(family, layers);
              set(c, ranks);
              c.layout.recompute = recompute;
              c.train.precision = precision;
              c.layout.overlap = overlap;
              c.train.dropout = layers == 5 ? 0.1f : 0;
              for (const OffloadTo where : kPlaces) require_replayed(offloaded(c, where));
              c.layout.offload.optimizer = OffloadTo::kNvme;  // which shares host memory and the drive
              if (layers == 5 && recompute == Recompute::kNone) require_replayed(offloaded(c, OffloadTo::kNvme));
            }
}

TEST_CASE("activations on the host: what is measured is what was planned") {
  for (const Ranks& ranks : kRanks)
    for (const bool overlap : {false, true}) {
      Case c = small_case(Family::kLlama);
      set(c, ranks);
      c.layout.overlap = overlap;
      c.layout.recompute = ranks.zero == 1 ? Recompute::kFull : Recompute::kNone;
      for (const OffloadTo where : kPlaces) require_measured_as_planned(offloaded(c, where));
    }
}

TEST_CASE("activations on the host: the same bits as without") {
  uint64_t number = 0;
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const Ranks& ranks : kRanks)
      for (const Precision precision : {Precision::kFp32, Precision::kBf16}) {
        if (number++ % dealt(1, 3) != 0) continue;
        Case c = small_case(family);
        set(c, ranks);
        c.train.precision = precision;
        c.train.dropout = 0.1f;
        c.layout.recompute = ranks.tp == 2 ? Recompute::kFull : Recompute::kNone;
        c.layout.overlap = family == Family::kGpt;
        require_same_bits(c, offloaded(c, precision == Precision::kFp32 ? OffloadTo::kNvme : OffloadTo::kCpu));
      }
}

TEST_CASE("the device's activations do not grow with depth once there are more layers than are under way") {
  const auto at = [](int64_t layers) { return activations(offloaded(small_case(Family::kGpt, layers))); };
  CHECK(at(6) == at(5));
  CHECK(at(12) == at(6));
  const auto kept = [](int64_t layers) { return activations(small_case(Family::kGpt, layers)); };
  CHECK(kept(12) > kept(6));
}

TEST_CASE("host memory holds what every layer but the last keeps, of every micro-batch in flight") {
  Case c = offloaded(small_case(Family::kGpt, 6));
  const Plan plan = plan_of(c);
  const int64_t input = kept_by_layer(plan).at("y");
  CHECK(peak(c, Space::kHost) == 5 * kept_bytes_of_layer(plan));
  c.layout.recompute = Recompute::kFull;
  CHECK(peak(c, Space::kHost) == 5 * input);
  c.train.grad_accumulation = 4;
  CHECK(peak(c, Space::kHost) == 5 * input);  // one micro-batch at a time
  set(c, {.pp = 2, .schedule = Schedule::kAfab, .accumulation = 4});
  // Every micro-batch but the last of stage 0, whose last layer's backward is the first to come.
  CHECK(peak(c, Space::kHost) == 4 * 3 * input);
}

TEST_CASE("on the way to NVMe host memory holds two layers or four, whatever the depth and the micro-batches in flight") {
  for (const int64_t layers : {8, 16}) {
    Case c = offloaded(small_case(Family::kGpt, layers), OffloadTo::kNvme);
    const int64_t one = kept_bytes_of_layer(plan_of(c));
    CHECK(peak(c, Space::kHost) == 2 * one);
    CHECK(peak(c, Space::kNvme) == (layers - 1) * one);
    CHECK(peak(c, Space::kDevice) == peak(offloaded(c, OffloadTo::kCpu), Space::kDevice));
    set(c, {.pp = 2, .schedule = Schedule::kAfab, .accumulation = 4});
    CHECK(peak(c, Space::kHost) <= 4 * one);  // two out and two in, where forward turns to backward
    c.layout.overlap = false;
    CHECK(peak(c, Space::kHost) == one);
  }
}

TEST_CASE("a layer that is needed at once stays on the device") {
  const Case one = offloaded(small_case(Family::kGpt, 1));
  CHECK(peak(one, Space::kHost) == 0);
  CHECK(peak(one, Space::kDevice) == peak(small_case(Family::kGpt, 1), Space::kDevice));
}

TEST_CASE("activations fit a device on which they would not fit without offload") {
  Case c = small_case(Family::kGpt, 16);
  c.train.seq_len = c.model.max_positions = 64;
  const int64_t all = peak(c, Space::kDevice), some = peak(offloaded(c), Space::kDevice);
  REQUIRE(some < all);
  c.machine.device.memory_bytes = some;
  const LowerOptions held{.after = {}, .budget = true};
  const auto without = lower(c, held);
  REQUIRE_FALSE(without.ok());
  CHECK(without.error().code == ExitCode::kNo);
  CHECK(lower(offloaded(c), held).ok());
  Case roomy = c;
  roomy.machine.device.memory_bytes = all;
  require_same_bits(roomy, offloaded(c));
}

}  // namespace shardlab::testing::of_activations
